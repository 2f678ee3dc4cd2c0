# SPDX-License-Identifier: Apache-2.0
"""On a GPU: the benchmark of kernels/benchmarks/gpu.py, problem by problem.

Its rules and checks hold: arms in turn, cold caches, results compared with
float64 first. Compiled PyTorch and the peers take part if they are installed.
"""

from collections.abc import Iterator
import functools
import os
import pathlib
import sys
from typing import Any

from experiments.first_hour import budget
from experiments.first_hour import rows as rows_lib

PART = "peers"
_KERNELS = pathlib.Path(__file__).parents[2] / "kernels"
_SUITES = ("phase1", "read")
_ROUNDS = 20


def tasks(platform: str, short: bool) -> list[budget.Task]:
  """One per problem; none on a TPU, and a few tiny ones on a CPU."""
  if platform not in ("gpu", "cpu"):
    return []
  gpu = _benchmark()
  found = []
  for suite in _SUITES:
    for problem in gpu.problems_of(suite, platform):
      call = functools.partial(measure, problem, platform, short)
      name = f"{suite}, {problem.shape}, {problem.mode}"
      seconds = 6 if short else 60
      found.append(budget.Task(PART, name, call, seconds))
  return found


def measure(
  problem: Any, platform: str, short: bool
) -> Iterator[dict[str, str]]:
  """A row per arm, in milliseconds; the limit is a copy of the same bytes."""
  # Two frameworks share the memory.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  gpu = _benchmark()
  machine = gpu.Machine(platform)
  for row in gpu.compare(problem, machine, 3 if short else _ROUNDS):
    status = {"ok": rows_lib.OK, "failed": rows_lib.FAILED}.get(
      row["status"], rows_lib.NOT_HERE
    )
    case = f"{row['suite']}, {row['shape']}, {row['mode']}"
    milliseconds = float(row["median_ms"]) if row["median_ms"] else None
    limit = None
    if milliseconds:
      limit = problem.moved_bytes / machine.copy_bandwidth * 1e3
    made = rows_lib.make(
      "operator",
      case,
      row["arm"],
      status=status,
      measured=milliseconds,
      spread=(
        (float(row["low_ms"]), float(row["high_ms"])) if milliseconds else None
      ),
      unit="ms",
      limit=limit,
      reason=row["reason"],
    )
    if row["to_xla"]:
      made["reason"] = f"{row['to_xla']} times xla"
    yield made


def _benchmark():
  """The module, which lies in the second source root of a clone."""
  if str(_KERNELS) not in sys.path:
    sys.path.append(str(_KERNELS))
  from benchmarks import gpu

  return gpu
