# SPDX-License-Identifier: Apache-2.0
"""Times programs in turn within one process.

Other load on the machine then affects all programs equally, so that ratios
within a round are meaningful even on a shared or throttled machine.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import statistics
import time
from typing import Any, NamedTuple, TypeVar

import jax

K = TypeVar("K")


class Seconds(NamedTuple):
  """Wall-clock time of one call, and processor time of all threads.

  Other processes affect the latter less.
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


def is_baseline(arm: str) -> bool:
  """Whether other arms are compared with this one."""
  return arm.partition(" ")[0] == "prenorm"


def ratios(
  times: Mapping[tuple[str, str], Sequence[Seconds]],
) -> Iterator[dict[str, Any]]:
  """Rows of times by program and arm, over the fastest baseline.

  `ratio` is the median over rounds of the ratio within a round, with its range,
  and `cpu_ratio` that of processor time; `seconds` and `cpu_seconds` are
  medians of the program itself.
  """
  median = statistics.median
  for (program, arm), seconds in times.items():
    bases = [b for p, b in times if p == program and is_baseline(b)]
    base = min(bases, key=lambda b: median(x.wall for x in times[program, b]))
    rounds = list(zip(seconds, times[program, base], strict=True))
    wall = [a.wall / b.wall for a, b in rounds]
    columns = {
      "ratio": median(wall),
      "ratio_min": min(wall),
      "ratio_max": max(wall),
      "cpu_ratio": median(a.cpu / b.cpu for a, b in rounds),
      "seconds": median(x.wall for x in seconds),
      "cpu_seconds": median(x.cpu for x in seconds),
    }
    yield {"program": program, "arm": arm, "baseline": base} | {
      name: round(value, 6) for name, value in columns.items()
    }
