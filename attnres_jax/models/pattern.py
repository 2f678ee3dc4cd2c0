# SPDX-License-Identifier: Apache-2.0
"""Finds patterns that repeat along the depth, to compile them once.

Pure Python on the kinds of sublayers ("attention", "mlp", "kda", ...).
"""

from collections.abc import Sequence
from typing import NamedTuple


class Run(NamedTuple):
  """Consecutive sublayers: `kinds`, repeated `repeats` times."""

  kinds: tuple[str, ...]
  repeats: int

  @property
  def length(self) -> int:
    return len(self.kinds) * self.repeats

  def count(self, kind: str) -> int:
    """Number of sublayers of this kind, over all repeats."""
    return self.kinds.count(kind) * self.repeats


def find_runs(kinds: Sequence[str]) -> tuple[Run, ...]:
  """Cuts a sequence of kinds into runs, greedily the longest repetition first.

  Of two repetitions of equal length, the one with the shorter period is chosen.
  Sublayers that repeat nothing become runs of length one.

    a b a b c   ->   (a b) x 2, (c) x 1
  """
  kinds, runs, start = tuple(kinds), [], 0
  while start < len(kinds):
    rest = kinds[start:]
    found = [
      Run(rest[:period], _repeats(rest, period))
      for period in range(1, len(rest) // 2 + 1)
    ]
    found = [run for run in found if run.repeats > 1]
    longest = max(found, key=lambda run: run.length, default=Run(rest[:1], 1))
    runs.append(longest)
    start += longest.length
  return tuple(runs)


def no_runs(kinds: Sequence[str]) -> tuple[Run, ...]:
  """Every sublayer as a separate run."""
  return tuple(Run((kind,), 1) for kind in kinds)


def _repeats(kinds: tuple[str, ...], period: int) -> int:
  """How often the first `period` kinds are repeated from the start."""
  count = 1
  while kinds[count * period : (count + 1) * period] == kinds[:period]:
    count += 1
  return count
