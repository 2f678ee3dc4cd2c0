# SPDX-License-Identifier: Apache-2.0
"""Effective speed-up: how many times the compute the baseline would need.

Suppose that the baseline's loss falls as C^-alpha, and that the other scheme at
C reaches the loss of the baseline at m C. Then their pairs of runs (same size,
same seed) differ by

  d = ln L_other - ln L_baseline = -alpha (ln m + ln C_other - ln C_baseline)

so that m follows from the mean of d and from alpha. What a pair has in common
(initial weights, order of the data, distance of its size from the law) cancels
in d. `fit.compute_advantage` instead compares two separate fits at one compute.

Both errors are estimated from the scatter of sizes, which includes what the
model does not fit: sizes off the baseline's law, and a speed-up that differs
between sizes. (A few sizes give few degrees of freedom and wide intervals.) The
error of the mean of d is the wider of this one and that of the seeds, since few
sizes may agree by chance.
"""

from collections.abc import Sequence

import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.scaling import fit
from attnres_jax.scaling import pairs as pairs_lib

# Quantiles of each of the two errors; their pairs are the distribution.
_QUANTILES = 100


def effective_speedup(
  baseline: fit.Runs,
  other: fit.Runs,
  *,
  spread: pairs_lib.Spread | None = None,
  level: float = pairs_lib.LEVEL,
) -> fit.Estimate:
  """The compute multiplier at equal loss, with an interval.

  Args:
    baseline: its runs at three or more computes, each with its own size label.
    other: runs of which two or more are paired with the baseline's by size and
      seed. If all pairs have one size, the speed-up is of this size, and its
      error is the scatter of seeds.
    spread: of the protocol (`pairs.pooled`), for pairs of one size; by default
      that of these pairs alone.
    level: of the interval. It is an exact combination of two t-distributions,
      as for a generalised confidence interval; its upper end is infinite if
      the baseline may not improve with compute at all.

  Raises:
    ConfigError: too few computes or pairs.
  """
  from scipy import stats  # As long as JAX to import.

  if not 0 < level < 1:
    config_lib.fail_argument("level", level, "a number between 0 and 1")
  slope, slope_error, slope_freedom = _slope(baseline)
  fit.refuse_failed(baseline)
  fit.refuse_failed(other)
  shared = of_pairs = None
  if spread is not None and len(set(other.size)) == 1:
    # From nats to ln L.
    shared = spread._replace(deviation=spread.deviation / np.mean(other.loss))
  apart, more, of_seeds = _pairs(baseline, other, 1 if shared else 2)
  shared = shared or of_seeds
  gain, cost = -np.mean(apart), np.mean(more)
  if len(apart) > 1:
    of_pairs = pairs_lib.Spread(float(np.std(apart, ddof=1)), len(apart) - 1)
  used, each = pairs_lib.wider(shared, of_pairs, level)
  assert used is not None
  gain_error = used.deviation / np.sqrt(len(apart))
  at = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
  gains = gain + gain_error * stats.t.ppf(at, used.freedom)
  slopes = slope + slope_error * stats.t.ppf(at, slope_freedom)
  # A baseline that does not improve would never catch up, or always be ahead.
  with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
    ratios = np.where(
      slopes > 0, np.divide.outer(gains, slopes), np.inf * gains[:, None]
    )
    values = np.exp(np.append(ratios, gain / slope) - cost)
  tails = (1 - each) / 2, (1 + each) / 2
  low, high = np.quantile(values[:-1], tails, method="inverted_cdf")
  return fit.Estimate(float(values[-1]), float(low), float(high))


def _slope(runs: fit.Runs) -> tuple[float, float, int]:
  """alpha, its standard error and degrees of freedom, from means of sizes."""
  from scipy import stats

  sizes = list(dict.fromkeys(runs.size))
  rows = [np.array([s == size for s in runs.size]) for size in sizes]
  x = np.array([np.log(runs.compute[at]).mean() for at in rows])
  y = np.array([np.log(runs.loss[at]).mean() for at in rows])
  if len(np.unique(x)) < 3:
    config_lib.fail_argument(
      "baseline", f"{len(np.unique(x))} computes", "at least 3"
    )
  line = stats.linregress(x, y)
  if line.slope >= 0:
    config_lib.fail_argument(
      "baseline", f"a loss that rises as C^{line.slope:.3g}", "one that falls"
    )
  return -line.slope, line.stderr, len(x) - 2


def _pairs(
  baseline: fit.Runs, other: fit.Runs, least: int
) -> tuple[np.ndarray, np.ndarray, pairs_lib.Spread | None]:
  """Differences of ln L and of ln C: means of sizes, or of one size's seeds.

  And, of means of sizes, how far their seeds let them scatter.
  """
  place = {label: i for i, label in enumerate(baseline.pairs)}
  by_size: dict[object, list[Sequence[float]]] = {}
  of_seeds = None
  for i, label in enumerate(other.pairs):
    if label in place:
      j = place[label]
      pair = (
        np.log(other.loss[i] / baseline.loss[j]),
        np.log(other.compute[i] / baseline.compute[j]),
      )
      by_size.setdefault(label[0], []).append(pair)
  if len(by_size) > 1:
    rows = [np.mean(pairs, axis=0) for pairs in by_size.values()]
    of_seeds = _spread_of_means([np.transpose(p)[0] for p in by_size.values()])
  else:
    rows = [pair for pairs in by_size.values() for pair in pairs]
  if len(rows) < least:
    config_lib.fail_argument(
      "other", f"{len(rows)} pairs with the baseline", f"at least {least}"
    )
  apart, more = np.transpose(rows)
  return apart, more, of_seeds


def _spread_of_means(apart: Sequence[np.ndarray]) -> pairs_lib.Spread | None:
  """The deviation of a mean of seeds, over sizes, by the scatter of seeds."""
  freedom = sum(len(of_size) - 1 for of_size in apart)
  if not freedom:
    return None
  variance = sum(np.var(d) * len(d) for d in apart) / freedom
  variance *= np.mean([1 / len(of_size) for of_size in apart])
  return pairs_lib.Spread(float(np.sqrt(variance)), freedom)
