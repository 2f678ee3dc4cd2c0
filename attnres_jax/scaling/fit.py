# SPDX-License-Identifier: Apache-2.0
"""Power laws of loss in compute, with intervals (section 5.1, Fig. 4).

The law is L = A C^-alpha, as in the paper, fitted to ln L by least squares.
Intervals come from a bootstrap over sizes and, within a size, over seeds. All
schemes share each draw: they were trained on the same sizes and seeds, so
common variation cancels in comparisons.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

import numpy as np

from attnres_jax import config as config_lib

# Computes that a law needs.
_DISTINCT = 2


class Estimate(NamedTuple):
  """A number and its interval; None if nothing was resampled."""

  value: float
  low: float | None = None
  high: float | None = None


@dataclasses.dataclass(frozen=True)
class PowerLaw:
  """L = coefficient * C ** -exponent."""

  coefficient: float
  exponent: float

  def __call__(self, compute: Any) -> Any:
    """The loss at a compute, or at an array of them."""
    return self.coefficient * compute**-self.exponent

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
  """A law and the laws of its bootstrap draws.

  Attributes:
    law: fitted to all runs.
    samples: one per draw; schemes that are fitted together share the draws.
  """

  law: PowerLaw
  samples: tuple[PowerLaw, ...] = ()

  def coefficient(self, level: float = 0.9) -> Estimate:
    return self._of(lambda law: law.coefficient, level)

  def exponent(self, level: float = 0.9) -> Estimate:
    return self._of(lambda law: law.exponent, level)

  def loss(self, compute: float, level: float = 0.9) -> Estimate:
    return self._of(lambda law: law(compute), level)

  def _of(self, number: Callable[[PowerLaw], float], level: float) -> Estimate:
    return _estimate(number(self.law), list(map(number, self.samples)), level)


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
  """Finished runs of one scheme, a row each.

  Attributes:
    compute: of each run, in any unit; becomes an array.
    loss: final losses; becomes an array.
    size: label of each run's size; runs of one size differ by seed only.
    seed: label of each run's seed.
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
    if len({*zip(self.size, self.seed)}) != len(loss):
      config_lib.fail_argument("seed", self.seed, "no seed twice within a size")


def fit_power_law(
  compute: Sequence[float] | np.ndarray, loss: Sequence[float] | np.ndarray
) -> PowerLaw:
  """Fits L = A C^-alpha to ln L.

  Args:
    compute: of each run, positive.
    loss: final losses, positive.

  Raises:
    ValueError: fewer than two distinct computes, or a value that is not
      positive.
  """
  compute, loss = _checked(compute, loss)
  if len(set(compute.tolist())) < _DISTINCT:
    config_lib.fail_argument(
      "compute", compute.tolist(), f"at least {_DISTINCT} distinct values"
    )
  return _least_squares(compute, loss)


def fit_schemes(
  runs: Mapping[str, Runs],
  rng: np.random.Generator,
  *,
  num_samples: int = 1000,
) -> dict[str, Fit]:
  """Fits every scheme, with bootstrap draws that all schemes share.

  A draw resamples the sizes with replacement and, within each size, its seeds.
  Draws with too few distinct sizes for the law are repeated. A run that failed
  under one scheme is missing in the draws of that scheme. There are no draws
  if a scheme has only two runs.

  Args:
    runs: of each scheme.
    rng: source of the draws.
    num_samples: draws.
  """
  laws = {
    name: fit_power_law(own.compute, own.loss) for name, own in runs.items()
  }
  samples = {name: [] for name in runs}
  seeds = _seeds_of_sizes(runs.values())
  if any(len(own.loss) <= _DISTINCT for own in runs.values()):
    num_samples = 0  # Every draw of the scheme would be the same runs.
  rows = {
    name: {label: i for i, label in enumerate(zip(own.size, own.seed))}
    for name, own in runs.items()
  }
  while any(len(drawn) < num_samples for drawn in samples.values()):
    labels = _draw(seeds, rng)
    chosen = {
      name: [own[label] for label in labels if label in own]
      for name, own in rows.items()
    }
    if any(
      len(set(runs[name].compute[index].tolist())) < _DISTINCT
      for name, index in chosen.items()
    ):
      continue
    for name, index in chosen.items():
      compute, loss = runs[name].compute[index], runs[name].loss[index]
      samples[name].append(_least_squares(compute, loss))
  return {name: Fit(laws[name], tuple(samples[name])) for name in runs}


def compute_advantage(
  baseline: PowerLaw | Fit,
  other: PowerLaw | Fit,
  compute: float,
  *,
  level: float = 0.9,
) -> Estimate:
  """How many times `compute` the baseline needs for the other law's loss.

  Args:
    baseline: the law of the baseline.
    other: the law whose loss at `compute` has to be reached.
    compute: where to compare, in the unit of the fits.
    level: of the interval, which needs two fits with draws in common.

  Returns:
    The advantage (1.25 for Block AttnRes at 5.6 PFLOP/s-days in the paper).
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
  values = [
    a.invert(b(compute)) / compute
    for a, b in zip(baseline.samples, other.samples)
  ]
  return _estimate(value, values, level)


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


def _least_squares(compute: np.ndarray, loss: np.ndarray) -> PowerLaw:
  x, y = np.log(compute), np.log(loss)
  centred = x - x.mean()
  slope = float(centred @ y / (centred @ centred))
  return PowerLaw(float(np.exp(y.mean() - slope * x.mean())), -slope)


def _seeds_of_sizes(runs) -> dict:
  seeds = {}
  for own in runs:
    for size, seed in zip(own.size, own.seed):
      seeds.setdefault(size, [])
      if seed not in seeds[size]:
        seeds[size].append(seed)
  return seeds


def _draw(seeds: Mapping, rng: np.random.Generator) -> list[tuple]:
  sizes, labels = list(seeds), []
  for pick in rng.integers(len(sizes), size=len(sizes)):
    own = seeds[sizes[pick]]
    chosen = rng.integers(len(own), size=len(own))
    labels += [(sizes[pick], own[i]) for i in chosen]
  return labels


def _estimate(value: float, values: Sequence[float], level: float) -> Estimate:
  if not 0 < level < 1:
    config_lib.fail_argument("level", level, "a number between 0 and 1")
  if not len(values):
    return Estimate(float(value))
  tails = [(1 - level) / 2, (1 + level) / 2]
  low, high = np.quantile(values, tails, method="inverted_cdf")
  return Estimate(float(value), float(low), float(high))
