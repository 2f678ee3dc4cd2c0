# SPDX-License-Identifier: Apache-2.0
"""How GPU arms are compared: the part that needs no GPU.

An arm is one implementation of a problem. Before it is timed, its results are
compared with float64 on the same inputs. An arm that fails stays in the table
as failed, and one that cannot be imported stays with the reason. Arms are timed
in turn, in alternating order, with the second-level cache flushed between
samples. Medians have bootstrap intervals, and slow arms stay in the table.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

FIELDS = (
  "suite",
  "shape",
  "mode",
  "arm",
  "status",
  "reason",
  "median_ms",
  "low_ms",
  "high_ms",
  "to_baseline",
  "GB",
  "GB_per_s",
  "of_copy",
  "error",
  "stored",
  "device",
  "jax",
  "torch",
  "commit",
)
OK, FAILED, NOT_RUN = "ok", "failed", "not run"
# The allowed error of an arm, as a multiple of the error of storing the exact
# result.
MARGIN = 2.0
# The average relative error of rounding to bfloat16, for single numbers that
# happen to be exact.
_ROUNDING = 2**-9 / math.sqrt(3)


class NotHere(Exception):
  """Why an arm cannot run here, in one line."""


@dataclasses.dataclass(frozen=True)
class Prepared:
  """An arm together with its inputs.

  Attributes:
    run: starts the work on one set of inputs and returns its future results.
    wait: blocks until the results are available.
    results: the outputs to compare, by name, as NumPy arrays.
  """

  run: Callable[[int], Any]
  wait: Callable[[Any], Any]
  results: Callable[[Any], Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Verdict:
  """The verdict of the oracle: worst relative error, and that of storage."""

  passed: bool
  error: float
  stored: float
  reason: str


def judge(
  results: Mapping[str, np.ndarray],
  exact: Mapping[str, np.ndarray],
  margin: float = MARGIN,
) -> Verdict:
  """Compares an arm's results with float64, by relative root-mean-square.

  Args:
    results: the outputs of the arm; all names of `exact`, and perhaps more.
    exact: the float64 results on the same inputs.
    margin: the allowed error, as a multiple of the error of rounding `exact` to
      bfloat16.
  """
  worst = Verdict(True, 0.0, 0.0, "")
  for name, wanted in exact.items():
    if name not in results:
      return Verdict(False, math.nan, math.nan, f"{name} is missing")
    actual = np.asarray(results[name]).astype(np.float64)
    if actual.shape != wanted.shape:
      reason = f"{name} is {actual.shape}, not {wanted.shape}"
      return Verdict(False, math.nan, math.nan, reason)
    error = relative_error(actual, wanted)
    stored = relative_error(wanted.astype(ml_dtypes.bfloat16), wanted)
    stored = max(stored, _ROUNDING)
    if not error <= margin * stored:
      reason = f"{name} is off by {error:.1e}, storage by {stored:.1e}"
      return Verdict(False, error, stored, reason)
    if error >= worst.error:
      worst = Verdict(True, error, stored, "")
  return worst


def relative_error(actual: np.ndarray, wanted: np.ndarray) -> float:
  """Root-mean-square of the difference over that of `wanted`."""
  wanted = np.asarray(wanted, np.float64)
  scale = np.mean(wanted**2)
  error = np.mean((np.asarray(actual, np.float64) - wanted) ** 2)
  return float(np.sqrt(error / scale if scale > 0 else error))


def turns(arms: Sequence[str], rounds: int) -> list[str]:
  """The order of samples: every arm once per round, every other one reversed.

  A drift of the clock then affects all arms equally.
  """
  order = []
  for i in range(rounds):
    order += list(arms) if i % 2 == 0 else list(reversed(arms))
  return order


def median_interval(
  samples: Sequence[float], draws: int = 2000
) -> tuple[float, float, float]:
  """The median and its 95 % bootstrap interval."""
  values = np.asarray(samples, np.float64)
  rng = np.random.default_rng(0)
  picks = rng.integers(0, len(values), (draws, len(values)))
  low, high = np.percentile(np.median(values[picks], axis=1), (2.5, 97.5))
  return float(np.median(values)), float(low), float(high)


def calls_per_sample(call_seconds: float, sample_seconds: float = 5e-3) -> int:
  """Calls per sample, enough to hide the cost of launching behind the work."""
  return int(min(50, max(1, math.ceil(sample_seconds / call_seconds))))


def input_sets(input_bytes: int, cache_bytes: int) -> int:
  """Sets of inputs to rotate through: together three times the cache."""
  return max(1, math.ceil(3 * cache_bytes / input_bytes))


def read_bytes(queries, sources, tokens, width, itemsize, mode) -> int:
  """Minimum traffic of one read: sources and mixtures, and likewise backward.

  The backward pass reads sources and output gradients and writes source
  gradients. Statistics and parameters are left out.
  """
  slabs = sources + queries
  if mode == "forward+backward":
    slabs += 2 * sources + queries
  return slabs * tokens * width * itemsize


def stack_bytes(sublayers, block, tokens, width, itemsize, mode) -> int:
  """Minimum traffic of a two-phase stack whose sublayers cost nothing.

  Per block of S sublayers over N sources, phase 1 reads N and writes S; every
  sublayer but the first merges: it reads the mixture, the partial sum and the
  last output, and writes the new sum and its own input. Backward, phase 1
  reads N + S and writes N; a merge reads mixture, sum and output gradient and
  writes two gradients.
  """
  slabs = 0
  starts = range(0, sublayers, block)
  for number, start in enumerate(starts, start=1):
    size = min(block, sublayers - start)
    slabs += number + size + 5 * (size - 1)
    if mode == "forward+backward":
      slabs += 2 * number + size + 5 * (size - 1)
  sources = len(starts) + 1
  slabs += sources + 1
  if mode == "forward+backward":
    slabs += 2 * sources + 1
  return slabs * tokens * width * itemsize


def row(
  common: Mapping[str, Any],
  arm: str,
  status: str,
  *,
  reason: str = "",
  verdict: Verdict | None = None,
  seconds: tuple[float, float, float] | None = None,
  baseline_seconds: float | None = None,
  moved_bytes: int | None = None,
  copy_bandwidth: float | None = None,
) -> dict[str, str]:
  """One line of the table; fields that do not apply stay empty.

  Args:
    common: suite, shape, mode, device, versions, commit.
    arm: its name.
    status: OK, FAILED or NOT_RUN.
    reason: for the latter two.
    verdict: of the oracle.
    seconds: median and interval of one call.
    baseline_seconds: median of the arm that the others are compared with.
    moved_bytes: minimum traffic of the problem.
    copy_bandwidth: bytes per second, read plus written, of a plain copy.
  """
  line = dict.fromkeys(FIELDS, "")
  line |= {name: str(value) for name, value in common.items()}
  line |= {"arm": arm, "status": status, "reason": " ".join(reason.split())}
  if verdict is not None:
    line |= {"error": f"{verdict.error:.1e}", "stored": f"{verdict.stored:.1e}"}
  if seconds is not None:
    names = ("median_ms", "low_ms", "high_ms")
    line |= {k: f"{s * 1e3:.4f}" for k, s in zip(names, seconds)}
    if baseline_seconds is not None:
      line["to_baseline"] = f"{seconds[0] / baseline_seconds:.3f}"
    if moved_bytes is not None:
      speed = moved_bytes / seconds[0]
      line |= {
        "GB": f"{moved_bytes / 1e9:.3f}",
        "GB_per_s": f"{speed / 1e9:.0f}",
      }
      if copy_bandwidth is not None:
        line["of_copy"] = f"{speed / copy_bandwidth:.3f}"
  if set(line) != set(FIELDS):
    raise ValueError(f"unknown fields: {sorted(set(line) - set(FIELDS))}")
  return line
