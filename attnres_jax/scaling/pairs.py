# SPDX-License-Identifier: Apache-2.0
"""Differences of paired runs, with one kind of interval.

A pair has the same initial weights and the same order of the data. All pairs of
one protocol (network size, steps, batch, learning rate) share one standard
deviation: with few seeds each, an estimate from all variants is far better than
one from each, and their noise has the same sources. `pooled` estimates it, and
`difference` turns it into a t interval for the mean of any two arms, whether
one of them is the baseline or not.

Noise of a variant may be larger than the protocol's, which few pairs cannot
tell. So an interval is the wider of two, one with the protocol's deviation and
one with that of its own pairs, which alone covers the truth. Each has a
slightly lower level, such that their union has about the level in either case:
86 % if the variant is noisier, and up to 95 % if it is not, for 90 %. A single
pair has no deviation; its interval supposes the protocol's. A variant that
scatters far more than the others does not count in the protocol's deviation,
and one that has nearly failed has no interval.
"""

from collections.abc import Mapping, Sequence
import math
import statistics
from typing import Any, NamedTuple

import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.scaling import fit

LEVEL = 0.9
# Nats per token: several times what any scheme gains or loses if it trains.
FAILED = 0.3
# How often one of equal variants does not count in the protocol's deviation.
OUTLYING = 0.01

Row = Mapping[str, Any]
Losses = Mapping[str, Mapping[int, float]]


class Spread(NamedTuple):
  """How far the differences of pairs scatter.

  The standard deviation of one pair's difference, in nats per token, has these
  degrees of freedom.
  """

  deviation: float
  freedom: float

  def quantile(self, level: float) -> float:
    """Half the width of an interval of this level for one pair's difference."""
    return float(_stats().t.ppf((1 + level) / 2, self.freedom) * self.deviation)


class Difference(NamedTuple):
  """The difference of one arm from another, pair by pair.

  Attributes:
    by_seed: differences in nats per token.
    spread: on which the interval rests, the protocol's or that of these pairs;
      None for too few pairs and for an arm that failed.
    level: of an interval with this spread.
  """

  by_seed: Mapping[int, float]
  spread: Spread | None = None
  level: float = LEVEL

  @property
  def mean(self) -> float:
    """The mean difference of all pairs."""
    return statistics.fmean(self.by_seed.values())

  @property
  def margin(self) -> float | None:
    """Half the width of the interval of the mean."""
    if self.spread is None:
      return None
    return self.spread.quantile(self.level) / math.sqrt(len(self.by_seed))


def losses(
  rows: Sequence[Row], column: str, loss: str = "validation_loss"
) -> dict[str, dict[int, float]]:
  """Losses, the cells of `loss`, by variant (of `column`) and by seed.

  Raises:
    ConfigError: a variant has two rows of a seed, of several protocols.
  """
  arms: dict[str, dict[int, float]] = {}
  for row in rows:
    by_seed, seed = arms.setdefault(row[column], {}), int(row["seed"])
    if seed in by_seed:
      expected = f"one row of seed {seed}, by one protocol (size, steps, rate)"
      config_lib.fail_argument(column, row[column], expected)
    by_seed[seed] = fit.loss_of(row, loss)
  return arms


def pooled(
  arms: Losses, baseline: str, control: str | None = None
) -> Spread | None:
  """The spread that the variants of a protocol share.

  Variants are paired with the baseline by seed. `control` should not differ and
  is left out.

  Returns:
    The spread, without variants that failed and without outlying ones; None if
    no variant has two pairs.
  """
  apart = {
    name: gaps
    for name, gaps in _apart(arms, baseline).items()
    if name != control and not _failed(gaps)
  }
  outlying = _outlying(apart)
  return _spread([gaps for name, gaps in apart.items() if name not in outlying])


def difference(
  arm: Mapping[int, float],
  other: Mapping[int, float],
  spread: Spread | None = None,
  level: float = LEVEL,
) -> Difference:
  """`arm` minus `other` over the seeds that both have.

  The spread is the protocol's; by default, that of these pairs alone.
  """
  by_seed = {seed: arm[seed] - other[seed] for seed in arm if seed in other}
  if not by_seed or _failed(by_seed):
    return Difference(by_seed, None, level)
  return Difference(by_seed, *wider(spread, _spread([by_seed]), level))


def differences(
  arms: Losses,
  baseline: str,
  control: str | None = None,
  spread: Spread | None = None,
  level: float = LEVEL,
) -> dict[str, Difference]:
  """Differences of every variant that shares a seed with the baseline.

  The spread is the protocol's; by default `pooled` of these losses. `control`
  should not differ; its spread is computed from its pairs alone.
  """
  spread = spread or pooled(arms, baseline, control)
  return {
    name: difference(
      arms[name], arms[baseline], None if name == control else spread, level
    )
    for name in _apart(arms, baseline)
  }


def wider(
  shared: Spread | None, paired: Spread | None, level: float
) -> tuple[Spread | None, float]:
  """The spread with the wider interval of the two, and the level of each."""
  if shared is None or paired is None or shared == paired:
    return shared or paired, level
  each = fit.level_of_each(level)
  return max(shared, paired, key=lambda s: s.quantile(each)), each


def _apart(arms: Losses, baseline: str) -> dict[str, dict[int, float]]:
  """Differences from the baseline; without variants that have no pair."""
  base = arms.get(baseline, {})
  apart = {
    name: {seed: arm[seed] - base[seed] for seed in arm if seed in base}
    for name, arm in arms.items()
    if name != baseline
  }
  return {name: gaps for name, gaps in apart.items() if gaps}


def _failed(by_seed: Mapping[int, float]) -> bool:
  return abs(statistics.fmean(by_seed.values())) > FAILED


def _outlying(apart: Losses) -> set[str]:
  """Variants whose pairs scatter more than noise that all share.

  The largest variance is compared with the mean of the others; the level is
  divided by the number of variants (Bonferroni).
  """
  several = {
    name: (float(np.var([*gaps.values()], ddof=1)), len(gaps) - 1)
    for name, gaps in apart.items()
    if len(gaps) > 1
  }
  outlying: set[str] = set()
  while len(several) > 2:
    name = max(several, key=lambda name: several[name][0])
    variance, freedom = several[name]
    others = [moments for other, moments in several.items() if other != name]
    rest = sum(of for _, of in others)
    mean = sum(value * of for value, of in others) / rest
    chance = _stats().f.sf(variance / mean, freedom, rest) if mean else 1.0
    if chance > OUTLYING / len(several):
      break
    outlying.add(name)
    del several[name]
  return outlying


def _spread(together: Sequence[Mapping[int, float]]) -> Spread | None:
  """The standard deviation of pairs around the mean of their variant."""
  several = [list(gaps.values()) for gaps in together if len(gaps) > 1]
  if not several:
    return None
  freedoms = np.array([len(gaps) - 1 for gaps in several])
  squares = sum(float(np.var(gaps)) * len(gaps) for gaps in several)
  freedom = int(freedoms.sum())
  # Half of the variance of a difference comes from the common baseline. So the
  # sums of squares of two variants have a quarter of the covariance that they
  # would have if the seeds of the smaller one were the same runs.
  shared = np.minimum.outer(freedoms, freedoms).sum() - freedom
  independent = freedom**2 / (freedom + shared / 4)
  return Spread(math.sqrt(squares / freedom), float(independent))


def _stats() -> Any:
  """SciPy's distributions, which take as long to import as JAX."""
  from scipy import stats

  return stats
