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
# How much likelier to miss each of two intervals is than the wider one.
_EACH = 1.4

Row = Mapping[str, Any]
Losses = Mapping[str, Mapping[int, float]]


class Spread(NamedTuple):
  """How far the differences of pairs scatter.

  Attributes:
    deviation: standard deviation of one pair's difference, nats per token.
    freedom: degrees of freedom of this estimate.
  """

  deviation: float
  freedom: float

  def quantile(self, level: float) -> float:
    """Of a pair's difference: half the width of an interval of this level."""
    return float(_stats().t.ppf((1 + level) / 2, self.freedom) * self.deviation)


class Difference(NamedTuple):
  """Of one arm from another, pair by pair.

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
    """Of all pairs."""
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
  found: dict[str, dict[int, float]] = {}
  for row in rows:
    own, seed = found.setdefault(row[column], {}), int(row["seed"])
    if seed in own:
      wanted = f"one row of seed {seed}, by one protocol (size, steps, rate)"
      config_lib.fail_argument(column, row[column], wanted)
    own[seed] = fit.loss_of(row, loss)
  return found


def pooled(
  found: Losses, baseline: str, control: str | None = None
) -> Spread | None:
  """The spread that the variants of a protocol share.

  Args:
    found: losses by variant and seed, of one protocol.
    baseline: with which every variant is paired.
    control: a variant that should not differ; it is left out.

  Returns:
    The spread, without variants that failed and without outlying ones; None if
    no variant has two pairs.
  """
  apart = {
    name: own
    for name, own in _apart(found, baseline).items()
    if name != control and not _failed(own)
  }
  outlying = _outlying(apart)
  return _spread([own for name, own in apart.items() if name not in outlying])


def difference(
  own: Mapping[int, float],
  other: Mapping[int, float],
  spread: Spread | None = None,
  level: float = LEVEL,
) -> Difference:
  """`own` minus `other` over the seeds that both have.

  Args:
    own: losses of an arm by seed.
    other: losses of the arm to compare with.
    spread: the protocol's; by default, that of these pairs alone.
    level: of the interval.
  """
  by_seed = {seed: own[seed] - other[seed] for seed in own if seed in other}
  if not by_seed or _failed(by_seed):
    return Difference(by_seed, None, level)
  return Difference(by_seed, *wider(spread, _spread([by_seed]), level))


def differences(
  found: Losses,
  baseline: str,
  control: str | None = None,
  spread: Spread | None = None,
  level: float = LEVEL,
) -> dict[str, Difference]:
  """Of every variant that has a seed in common with the baseline.

  Args:
    found: losses by variant and seed.
    baseline: with which the others are compared.
    control: a variant that should not differ; its spread is computed from its
      pairs alone.
    spread: the protocol's; by default `pooled` of these losses.
    level: of the intervals.
  """
  spread = spread or pooled(found, baseline, control)
  return {
    name: difference(
      found[name], found[baseline], None if name == control else spread, level
    )
    for name in _apart(found, baseline)
  }


def wider(
  shared: Spread | None, alone: Spread | None, level: float
) -> tuple[Spread | None, float]:
  """The spread with the wider interval of the two, and the level of each."""
  if shared is None or alone is None or shared == alone:
    return shared or alone, level
  each = 1 - _EACH * (1 - level)
  return max(shared, alone, key=lambda one: one.quantile(each)), each


def _apart(found: Losses, baseline: str) -> dict[str, dict[int, float]]:
  """Differences from the baseline; without variants that have no pair."""
  base = found.get(baseline, {})
  apart = {
    name: {seed: own[seed] - base[seed] for seed in own if seed in base}
    for name, own in found.items()
    if name != baseline
  }
  return {name: own for name, own in apart.items() if own}


def _failed(by_seed: Mapping[int, float]) -> bool:
  return abs(statistics.fmean(by_seed.values())) > FAILED


def _outlying(apart: Losses) -> set[str]:
  """Variants whose pairs scatter more than noise that all share.

  The largest variance is compared with the mean of the others; the level is
  divided by the number of variants (Bonferroni).
  """
  several = {
    name: (float(np.var([*own.values()], ddof=1)), len(own) - 1)
    for name, own in apart.items()
    if len(own) > 1
  }
  found: set[str] = set()
  while len(several) > 2:
    name = max(several, key=lambda name: several[name][0])
    variance, freedom = several[name]
    others = [one for other, one in several.items() if other != name]
    rest = sum(of for _, of in others)
    mean = sum(own * of for own, of in others) / rest
    chance = _stats().f.sf(variance / mean, freedom, rest) if mean else 1.0
    if chance > OUTLYING / len(several):
      break
    found.add(name)
    del several[name]
  return found


def _spread(together: Sequence[Mapping[int, float]]) -> Spread | None:
  """The standard deviation of pairs around the mean of their variant."""
  several = [list(one.values()) for one in together if len(one) > 1]
  if not several:
    return None
  freedoms = np.array([len(one) - 1 for one in several])
  squares = sum(float(np.var(one)) * len(one) for one in several)
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
