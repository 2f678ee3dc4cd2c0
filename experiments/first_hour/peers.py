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
# By what they tell: a step, the stack, then single reads.
_SUITES = ("step", "stack", "phase1", "read")
_TRIED = ("stack", "phase1")  # On a CPU.
_ROUNDS = 20


def tasks(platform: str, short: bool) -> list[budget.Task]:
  """One per problem; none on a TPU, and a few tiny ones on a CPU."""
  if platform not in ("gpu", "cpu"):
    return []
  gpu = _benchmark()
  found = []
  for suite in _TRIED if short else _SUITES:
    for problem in gpu.problems_of(suite, platform):
      call = functools.partial(measure, problem, platform, short)
      name = f"{suite}, {problem.shape}, {problem.mode}"
      seconds = 6 if short else 150 if suite == "step" else 60
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
    if problem.moved_bytes and milliseconds:
      limit = problem.moved_bytes / machine.copy_bandwidth * 1e3
    made = rows_lib.make(
      "step over PreNorm" if row["suite"] == "step" else "operator",
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
    if row["to_baseline"]:
      made["reason"] = f"{row['to_baseline']} times {problem.baseline}"
    yield made


def _benchmark():
  """The module, which lies in the second source root of a clone."""
  if str(_KERNELS) not in sys.path:
    sys.path.append(str(_KERNELS))
  from benchmarks import gpu

  return gpu
