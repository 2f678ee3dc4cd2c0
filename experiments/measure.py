# SPDX-License-Identifier: Apache-2.0
"""Times programs in turn within one process.

Other load on the machine then affects all programs equally, so that ratios
within a round are meaningful even on a shared or throttled machine.
"""

from collections.abc import Callable, Mapping, Sequence
import statistics
import time
from typing import Any, NamedTuple, TypeVar

import jax

K = TypeVar("K")


class Seconds(NamedTuple):
  """Times of one call, in seconds.

  Attributes:
    wall: wall-clock time.
    cpu: processor time of all threads of this process, which other processes
      affect less.
  """

  wall: float
  cpu: float


def in_turn(
  calls: Mapping[K, Callable[[], Any]], rounds: int
) -> dict[K, list[Seconds]]:
  """Times of each call in each round, after one warm-up round.

  The order alternates, so that drift does not favour a position.
  """
  times: dict[K, list[Seconds]] = {name: [] for name in calls}
  for index in range(rounds + 1):
    for name in list(calls)[:: 1 if index % 2 else -1]:
      seconds = timed(calls[name])
      if index:
        times[name].append(seconds)
  return times


def timed(call: Callable[[], Any]) -> Seconds:
  """Times one call, until its arrays are computed."""
  start = time.perf_counter(), time.process_time()
  jax.block_until_ready(call())
  return Seconds(time.perf_counter() - start[0], time.process_time() - start[1])


def ratios(
  arm: Sequence[Seconds], base: Sequence[Seconds], digits: int = 4
) -> dict[str, float]:
  """Columns of a row: time over that of a baseline in the same round.

  `ratio` is the median over rounds, with its range, and `cpu_ratio` that of
  processor time; `seconds` and `cpu_seconds` are medians of the program itself.
  """
  wall = [a.wall / b.wall for a, b in zip(arm, base, strict=True)]
  cpu = [a.cpu / b.cpu for a, b in zip(arm, base, strict=True)]
  columns = {
    "ratio": statistics.median(wall),
    "ratio_min": min(wall),
    "ratio_max": max(wall),
    "cpu_ratio": statistics.median(cpu),
    "seconds": statistics.median(x.wall for x in arm),
    "cpu_seconds": statistics.median(x.cpu for x in arm),
  }
  return {name: round(value, digits) for name, value in columns.items()}
