# SPDX-License-Identifier: Apache-2.0
"""Where sublayers are in the depth segments of a scheme, as numbers.

A loop over depth (`depth_scan`) reads these numbers from a table at run time,
so its program depends neither on where segments begin nor on their number.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.models import memory as memory_lib
from attnres_jax.models import stacks
from attnres_jax.models.residuals import base


class At(NamedTuple):
  """Where a sublayer is; in a loop, numbers known at run time.

  Attributes:
    l: the sublayer, counted from the first one of its part of the network.
    index: in the stack of its kind.
    opens: whether it is the first of its segment in this part, 0 or 1.
    closes: whether it is the last one.
    first: whether it is the first of its segment in the network.
    place: how many sublayers of the segment have run in this part.
    sources: how many there are when the segment opens; its own come next.
    before: the same of the last segment; of the first one, its own.
    kept: how many sublayers before it are not the first of a segment.
  """

  l: Any
  index: Any
  opens: Any
  closes: Any
  first: Any
  place: Any
  sources: Any
  before: Any
  kept: Any

  @property
  def begin(self) -> Any:
    """The sublayer that opens the segment."""
    return self.l - self.place

  @property
  def kept_next(self) -> Any:
    """`kept` of the next sublayer."""
    return self.kept + 1 - self.first


class Pattern(NamedTuple):
  """Sublayers that repeat a pattern.

  Attributes:
    kinds: of the pattern.
    at: of each repeat, where its sublayers are.
  """

  kinds: tuple[str, ...]
  at: tuple[tuple[At, ...], ...]

  @property
  def positions(self) -> tuple[tuple[At, ...], ...]:
    """For each position in the pattern, where its sublayers are."""
    return tuple(zip(*self.at))

  @property
  def table_GPN(self) -> np.ndarray:
    """The numbers of all repeats and positions."""
    return np.asarray(self.at, np.int32)


def check(
  kinds: Sequence[str],
  ends: Sequence[int],
  residual: base.Residual,
  memory: memory_lib.DepthMemory,
  *,
  scan: bool,
) -> None:
  """Refuses networks that are no loop over depth.

  Args:
    kinds: of all sublayers.
    ends: of the parts that are run apart, such as the chunks of a pipeline.
    residual: the scheme.
    memory: what mixers keep for later mixers.
    scan: `model.scan_layers`.

  Raises:
    ConfigError: names the reason: the scheme or an option, or that no part
      repeats anything.
  """
  parts = [kinds[start:end] for start, end in zip((0, *ends), ends)]
  repeats = [run.repeats for part in parts for run in stacks.find_runs(part)]
  for wrong, reason in (
    (not residual.banked, f"with {type(residual).__name__}"),
    (not isinstance(memory, memory_lib.NoMemory), "with model.depth_memory"),
    (not scan, "with model.scan_layers=False"),
    (max(repeats) == 1, "where no pattern of sublayers repeats"),
  ):
    if wrong:
      config_lib.fail("model.depth_loop", "scan", f"'unrolled' {reason}")


def places(
  kinds: Sequence[str], residual: base.Residual, start: int
) -> tuple[At, ...]:
  """Where the sublayers of a part of a network are.

  Args:
    kinds: of these sublayers.
    residual: a banked scheme, of the whole network.
    start: number of sublayers before them.
  """
  stop, found, sources, kept = start + len(kinds), [], None, 0
  for first, end in residual.segments():
    begin, end = max(first, start), min(end, stop)
    if begin >= end:
      continue
    before, sources = sources, residual.num_sources(begin)
    for l in range(begin, end):
      own = l - start
      found.append(
        At(
          l=own,
          index=kinds[:own].count(kinds[own]),
          opens=int(l == begin),
          closes=int(l == end - 1),
          first=int(l == first),
          place=l - begin,
          sources=sources,
          before=sources if before is None else before,
          kept=kept,
        )
      )
      kept += l != first
  return tuple(found)


def patterns(kinds: Sequence[str], places: Sequence[At]) -> tuple[Pattern, ...]:
  """Sublayers as patterns that repeat, in the order of depth."""
  found, first = [], 0
  for run in stacks.find_runs(kinds):
    stop, period = first + run.length, len(run.kinds)
    repeats = [places[l : l + period] for l in range(first, stop, period)]
    found.append(Pattern(run.kinds, tuple(map(tuple, repeats))))
    first = stop
  return tuple(found)
