# SPDX-License-Identifier: Apache-2.0
"""Differences of paired runs from a baseline, with intervals.

A pair has the same initial weights and the same order of the data. Variants
share one standard deviation: with few seeds each, an estimate from all of them
is far better than one from each, and their noise has the same sources. A
variant whose pairs are far more apart than those of all others, one of which
has nearly failed, has a deviation of its own.
"""

from collections.abc import Mapping, Sequence
import math
import statistics
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.9
# Nats per token: several times what any scheme gains or loses if it trains.
FAILED = 0.3
# How often one of equal variants gets a deviation of its own.
OUTLYING = 0.01

Row = Mapping[str, Any]


class Difference(NamedTuple):
  """Of a variant from the baseline.

  Attributes:
    by_seed: in nats per token.
    margin: half the width of the interval of their mean; None if there is
      no variant with two seeds.
    deviation: standard deviation of a pair, on which the margin rests.
  """

  by_seed: Mapping[int, float]
  margin: float | None = None
  deviation: float | None = None

  @property
  def mean(self) -> float:
    return statistics.fmean(self.by_seed.values())


def losses(rows: Sequence[Row], column: str) -> dict[str, dict[int, float]]:
  """Validation losses by variant, the cell of `column`, and by seed."""
  found: dict[str, dict[int, float]] = {}
  for row in rows:
    own = found.setdefault(row[column], {})
    own[int(row["seed"])] = float(row["validation_loss"])
  return found


def differences(
  found: Mapping[str, Mapping[int, float]],
  baseline: str,
  control: str | None = None,
  level: float = LEVEL,
) -> dict[str, Difference]:
  """Of every variant that has a seed in common with the baseline.

  Args:
    found: losses by variant and seed.
    baseline: what the others are compared with.
    control: a variant that should not differ; its spread is its own.
    level: of the intervals.

  The spread of a variant that is worse by more than `FAILED` is its own, too:
  how runs fail says nothing about those that train. So is one that an F-test
  against all others rejects, one variant after the other.
  """
  base = found.get(baseline, {})
  apart = {
    name: {seed: own[seed] - base[seed] for seed in own if seed in base}
    for name, own in found.items()
    if name != baseline
  }
  apart = {name: own for name, own in apart.items() if own}
  alone = {
    name
    for name, own in apart.items()
    if name == control or statistics.fmean(own.values()) > FAILED
  }
  alone |= _outlying({n: own for n, own in apart.items() if n not in alone})
  shared = [own for name, own in apart.items() if name not in alone]
  return {
    name: _difference(own, [own] if name in alone else shared, level)
    for name, own in apart.items()
  }


def _outlying(apart: Mapping[str, Mapping[int, float]]) -> set[str]:
  """Variants whose pairs are more apart than noise that all share.

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
    chance = stats.f.sf(variance / mean, freedom, rest) if mean else 1.0
    if chance > OUTLYING / len(several):
      break
    found.add(name)
    del several[name]
  return found


def _difference(
  own: Mapping[int, float],
  together: Sequence[Mapping[int, float]],
  level: float,
) -> Difference:
  """With the standard deviation of all `together`."""
  several = [list(one.values()) for one in together if len(one) > 1]
  if not several:
    return Difference(own)
  freedom = sum(len(one) - 1 for one in several)
  squares = sum(float(np.var(one)) * len(one) for one in several)
  independent = _independent(freedom, len(several))
  quantile = float(stats.t.ppf((1 + level) / 2, independent))
  deviation = math.sqrt(squares / freedom)
  return Difference(own, quantile * deviation / math.sqrt(len(own)), deviation)


def _independent(freedom: int, count: int) -> float:
  """Degrees of freedom of a variance that `count` variants estimate together.

  Half of the variance of a difference is that of the common baseline, so two
  variants' estimates of it have a correlation of a quarter.
  """
  return freedom / (1 + (count - 1) / 4)
