# SPDX-License-Identifier: Apache-2.0
"""Power laws of loss in compute, with intervals (section 5.1, Fig. 4).

The law is L = A C^-alpha, as in the paper, fitted to ln L by least squares.
Laws are drawn around the fitted ones, from a t-distribution, in two ways. The
errors of one come from how far the means of sizes are from the law, which
contains what the law does not fit, with two degrees of freedom fewer than there
are sizes. So two sizes have no interval, and of three some are close to their
law by chance. The errors of the other come from how far the seeds of a size are
from their mean. The interval is the wider of the two, at a level that keeps the
union near the stated one (`pairs` says how near). Errors of schemes are drawn
with the correlation of their residuals: they were trained on the same sizes and
seeds, so common variation cancels in comparisons.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
from typing import Any, NamedTuple

import numpy as np

from attnres_jax import config as config_lib

# A run has diverged if its loss is so many times what the law of its scheme
# says, which needs some runs. A run that trains badly is below: it is a result.
FAILED, _ENOUGH = 1.5, 5
# Computes that a law needs.
_DISTINCT = 2
# How much likelier to miss each of two intervals is than the wider one.
_EACH = 1.4


class Estimate(NamedTuple):
  """A number and its interval; None if nothing was resampled."""

  value: float
  low: float | None = None
  high: float | None = None


def level_of_each(level: float) -> float:
  """The level of two intervals whose wider one has about this level."""
  if not 0 < level < 1:
    config_lib.fail_argument("level", level, "a number between 0 and 1")
  return 1 - _EACH * (1 - level)


@dataclasses.dataclass(frozen=True)
class PowerLaw:
  """L = coefficient * C ** -exponent."""

  coefficient: float
  exponent: float

  def __call__(self, compute: Any) -> Any:
    """The loss at a compute, or at an array of them."""
    with np.errstate(over="ignore"):
      loss = self.coefficient * np.asarray(compute, float) ** -self.exponent
    return float(loss) if loss.ndim == 0 else loss

  def invert(self, loss: Any) -> Any:
    """The compute at which the law reaches a loss."""
    loss = np.asarray(loss, float)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
      # A flat law never reaches a loss below it, and needs no compute for
      # others.
      root = np.divide(1.0, self.exponent)
      compute = (self.coefficient / loss) ** root
    return float(compute) if compute.ndim == 0 else compute


@dataclasses.dataclass(frozen=True)
class Fit:
  """A law and draws of it.

  Attributes:
    law: fitted to all runs.
    samples: as likely as each other, given how far sizes are from the law;
      schemes that are fitted together share the draws. Without an interval,
      there are none.
    seed_samples: the same, given how far seeds are from each other; none
      without a size of several seeds.
  """

  law: PowerLaw
  samples: tuple[PowerLaw, ...] = ()
  seed_samples: tuple[PowerLaw, ...] = ()

  def coefficient(self, level: float = 0.9) -> Estimate:
    return self._of(lambda law: law.coefficient, level)

  def exponent(self, level: float = 0.9) -> Estimate:
    return self._of(lambda law: law.exponent, level)

  def loss(self, compute: float, level: float = 0.9) -> Estimate:
    return self._of(lambda law: law(compute), level)

  def _of(self, number: Callable[[PowerLaw], float], level: float) -> Estimate:
    draws = self.samples, self.seed_samples
    values = (list(map(number, laws)) for laws in draws)
    return _wider_estimate(number(self.law), level, *values)


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
  """Finished runs of one scheme, a row each.

  Compute, in any unit, and final losses become arrays. Runs of one size differ
  by seed only.
  """

  compute: Any
  loss: Any
  size: tuple
  seed: tuple

  def __post_init__(self):
    compute, loss = _checked(self.compute, self.loss)
    object.__setattr__(self, "compute", compute)
    object.__setattr__(self, "loss", loss)
    for name in ("size", "seed"):
      labels = tuple(getattr(self, name))
      object.__setattr__(self, name, labels)
      if len(labels) != len(loss):
        config_lib.fail_argument(
          name, labels, f"{len(loss)} labels, one per run"
        )
    if len({*self.pairs}) != len(loss):
      config_lib.fail_argument("seed", self.seed, "no seed twice within a size")

  @property
  def pairs(self) -> list[tuple[Any, Any]]:
    """(size, seed) of each run."""
    return list(zip(self.size, self.seed))


def fit_power_law(
  compute: Sequence[float] | np.ndarray, loss: Sequence[float] | np.ndarray
) -> PowerLaw:
  """Fits L = A C^-alpha to ln L of final losses over compute.

  Raises:
    ValueError: fewer than two distinct computes, or a value that is not
      positive.
  """
  compute, loss = _checked(compute, loss)
  if len(set(compute.tolist())) < _DISTINCT:
    config_lib.fail_argument(
      "compute", compute.tolist(), f"at least {_DISTINCT} distinct values"
    )
  x, y = np.log(compute), np.log(loss)
  centred = x - x.mean()
  slope = float(centred @ y / (centred @ centred))
  return PowerLaw(float(np.exp(y.mean() - slope * x.mean())), -slope)


def fit_schemes(
  runs: Mapping[str, Runs], rng: np.random.Generator, *, num_samples: int = 1000
) -> dict[str, Fit]:
  """Fits every scheme, with `num_samples` draws that all schemes share.

  A missing run changes only the draws of its own scheme. If a scheme has only
  two sizes, no scheme has draws.

  Raises:
    ConfigError: a run has diverged; `without_failed` leaves it out.
  """
  for arm in runs.values():
    refuse_failed(arm)
  laws = {
    name: fit_power_law(arm.compute, arm.loss) for name, arm in runs.items()
  }
  means = {name: _Means.of(arm) for name, arm in runs.items()}
  sizes = list(
    dict.fromkeys(size for mean in means.values() for size in mean.row)
  )
  pairs = list(
    dict.fromkeys(pair for arm in runs.values() for pair in arm.pairs)
  )
  of_sizes, of_seeds = {}, {}
  for name, mean in means.items():
    off_law = dict(zip(mean.row, mean.residual(laws[name])))
    of_sizes[name] = _Residuals(off_law, mean.freedom)
    apart = mean.apart(runs[name])
    of_seeds[name] = _Residuals(apart, len(apart) - len(mean.row))
  if any(residuals.freedom < 1 for residuals in of_sizes.values()):
    num_samples = 0
  drawn = [
    _errors(rng, num_samples, sizes, labels, residuals)
    for labels, residuals in ((sizes, of_sizes), (pairs, of_seeds))
  ]
  at = {
    name: [sizes.index(s) for s in mean.row] for name, mean in means.items()
  }
  return {
    name: Fit(
      law, *(means[name].moved(law, e[name][:, at[name]]) for e in drawn)
    )
    for name, law in laws.items()
  }


class _Residuals(NamedTuple):
  """Residuals of a scheme by label, in units of a run's error."""

  by_label: Mapping[Any, float]
  freedom: int


def _errors(
  rng: np.random.Generator,
  num_samples: int,
  sizes: Sequence[Any],
  labels: Sequence[Any],
  residuals: Mapping[str, _Residuals],
) -> dict[str, np.ndarray]:
  """Errors of the means of sizes [N, S], in units of a run's error.

  Products of schemes' residuals, summed over labels, are the covariance of
  their errors; a label without runs has no residual. No draws if a scheme has
  no degree of freedom.
  """
  from scipy import stats  # As long as JAX to import.

  if min((r.freedom for r in residuals.values()), default=0) < 1:
    num_samples = 0
  errors = rng.standard_normal((num_samples, len(sizes), len(labels)))
  chance = rng.random(num_samples)
  drawn = {}
  for name, (by_label, freedom) in residuals.items():
    residual_R = np.array([by_label.get(label, 0.0) for label in labels])
    scale = np.sqrt(stats.chi2.ppf(chance, max(freedom, 1)))
    drawn[name] = (errors @ residual_R) / scale[:, None]
  return drawn


class _Means(NamedTuple):
  """Sizes of a scheme: means of ln C and ln L, and roots of numbers of runs.

  Least squares of the means, weighted by runs, is least squares of the runs,
  which have one compute per size.
  """

  row: tuple
  x: np.ndarray
  y: np.ndarray
  weight: np.ndarray

  @classmethod
  def of(cls, runs: "Runs") -> "_Means":
    row = tuple(dict.fromkeys(runs.size))
    each = [np.array([s == size for s in runs.size]) for size in row]
    x, y = (
      np.array([np.log(values[at]).mean() for at in each])
      for values in (runs.compute, runs.loss)
    )
    return cls(row, x, y, np.sqrt([at.sum() for at in each]))

  @property
  def freedom(self) -> int:
    return len(np.unique(self.x)) - _DISTINCT

  def residual(self, law: PowerLaw) -> np.ndarray:
    """How far ln L is from the law, in units of a run's error."""
    return self.weight * (self.y - np.log(law(np.exp(self.x))))

  def apart(self, runs: "Runs") -> dict[Any, float]:
    """(size, seed) -> how far ln L of a run is from the mean of its size."""
    mean = dict(zip(self.row, self.y))
    return {
      pair: np.log(loss) - mean[pair[0]]
      for pair, loss in zip(runs.pairs, runs.loss)
    }

  def moved(self, law: PowerLaw, error_NS: np.ndarray) -> tuple[PowerLaw, ...]:
    """The laws whose runs would have had these further errors."""
    design = np.stack([self.weight, self.weight * self.x])
    height_N, slope_N = np.linalg.pinv(design.T) @ error_NS.T
    # With three sizes, some draws are far beyond any loss.
    height_N = np.clip(np.log(law.coefficient) + height_N, -700, 700)
    return tuple(
      map(
        PowerLaw, np.exp(height_N).tolist(), (law.exponent - slope_N).tolist()
      )
    )


def loss_of(row: Mapping[str, Any], column: str = "validation_loss") -> float:
  """The loss of a row, as every table and fit reads it.

  Raises:
    ConfigError: it is no finite number above 0.
  """
  text, loss = row[column], np.nan
  with contextlib.suppress(ValueError):
    loss = float(text)
  if not 0 < loss < np.inf:
    config_lib.fail_argument(column, text, "a finite number above 0")
  return loss


def failed(runs: Runs) -> list[int]:
  """Which runs have diverged: those far above the law of the other runs.

  The law is the median of the lines through two runs, which a few runs do not
  move.
  """
  x, y = np.log(runs.compute), np.log(runs.loss)
  if len(x) < _ENOUGH:
    return []
  i, j = np.nonzero(np.subtract.outer(x, x) > 0)
  slope = float(np.median((y[i] - y[j]) / (x[i] - x[j]))) if len(i) else 0.0
  above = y - slope * x
  limit = np.median(above) + np.log(FAILED)
  return np.flatnonzero(above > limit).tolist()


def without_failed(runs: Runs) -> tuple[Runs, list[int]]:
  """The runs that have not diverged, and which of them have."""
  bad = failed(runs)
  rest = [i for i in range(len(runs.loss)) if i not in bad]
  pick = lambda labels: tuple(labels[i] for i in rest)
  left = Runs(
    runs.compute[rest], runs.loss[rest], pick(runs.size), pick(runs.seed)
  )
  return left, bad


def refuse_failed(runs: Runs) -> None:
  """Raises ConfigError for the first run that has diverged."""
  for i in failed(runs):
    config_lib.fail_argument(
      "loss",
      f"{runs.loss[i]:.4g} of size {runs.size[i]!r}, seed {runs.seed[i]!r}",
      "runs near their power law; without_failed leaves out what diverged",
    )


def compute_advantage(
  baseline: PowerLaw | Fit,
  other: PowerLaw | Fit,
  compute: float,
  *,
  level: float = 0.9,
) -> Estimate:
  """How many times `compute` the baseline needs for the other law's loss.

  It is 1.25 for Block AttnRes at 5.6 PFLOP/s-days in the paper. An interval of
  this level needs two fits with draws in common.
  """
  if compute <= 0:
    config_lib.fail_argument("compute", compute, "a number above 0")
  baseline, other = (
    law if isinstance(law, Fit) else Fit(law) for law in (baseline, other)
  )
  if len(baseline.samples) != len(other.samples):
    config_lib.fail_argument(
      "other",
      f"{len(other.samples)} draws",
      f"the baseline's {len(baseline.samples)}, from one call of fit_schemes",
    )
  value = baseline.law.invert(other.law(compute)) / compute
  values = (
    [_ratio(a, b, compute) for a, b in zip(*samples)]
    for samples in (
      (baseline.samples, other.samples),
      (baseline.seed_samples, other.seed_samples),
    )
  )
  return _wider_estimate(value, level, *values)


def _ratio(baseline: PowerLaw, other: PowerLaw, compute: float) -> float:
  """A baseline that does not improve never catches up, or is always ahead."""
  if baseline.exponent > 0:
    return baseline.invert(other(compute)) / compute
  return np.inf if other(compute) < baseline(compute) else 0.0


def _checked(compute, loss) -> tuple[np.ndarray, np.ndarray]:
  arrays = np.asarray(compute, float), np.asarray(loss, float)
  for name, array in zip(("compute", "loss"), arrays):
    if array.ndim != 1:
      config_lib.fail_argument(
        name, array.tolist(), "a flat sequence of numbers"
      )
    bad = array[~(np.isfinite(array) & (array > 0))]
    if bad.size:
      config_lib.fail_argument(name, bad[0].item(), "finite numbers above 0")
  if len(arrays[0]) != len(arrays[1]):
    config_lib.fail_argument(
      "loss", f"{len(arrays[1])} values", f"{len(arrays[0])}, as in compute"
    )
  return arrays


def _wider_estimate(
  value: float, level: float, by_sizes: list[float], by_seeds: list[float]
) -> Estimate:
  """The wider of two intervals, each at a slightly lower level."""
  if not by_sizes or not by_seeds:
    return _estimate(value, by_sizes, level)
  each = level_of_each(level)
  estimates = [_estimate(value, draws, each) for draws in (by_sizes, by_seeds)]
  return max(estimates, key=_width)


def _width(estimate: Estimate) -> float:
  low, high = estimate.low, estimate.high
  if low is None or high is None or low == high:  # Both may be infinite.
    return 0.0
  return high - low


def _estimate(value: float, values: Sequence[float], level: float) -> Estimate:
  if not 0 < level < 1:
    config_lib.fail_argument("level", level, "a number between 0 and 1")
  if not len(values):
    return Estimate(float(value))
  tails = [(1 - level) / 2, (1 + level) / 2]
  low, high = np.quantile(values, tails, method="inverted_cdf")
  return Estimate(float(value), float(low), float(high))
