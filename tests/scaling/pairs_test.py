# SPDX-License-Identifier: Apache-2.0
"""Intervals of paired differences contain the truth as often as they say."""

import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.scaling import pairs

EFFECTS = {"a": -0.02, "b": 0.01, "c": 0.0}


def _losses(rng, seeds):
  """Large noise that pairs share, and a little that they do not."""
  shared = rng.normal(2.0, 0.3, seeds)
  effects = {"base": 0.0} | EFFECTS
  return {
    name: dict(enumerate(shared + effect + rng.normal(0, 0.01, seeds)))
    for name, effect in effects.items()
  }


@pytest.mark.parametrize("seeds", [2, 3, 6])
def test_coverage(seeds):
  rng = np.random.default_rng(0)
  hits, widths, deviations = [], [], []
  for _ in range(200):
    found = pairs.differences(_losses(rng, seeds), "base")
    for name, effect in EFFECTS.items():
      hits.append(abs(found[name].mean - effect) <= found[name].margin)
      widths.append(found[name].margin)
    deviations.append(found["a"].spread.deviation)
  # A difference has the noise of two runs.
  mean_square = np.mean(np.square(deviations))
  assert mean_square == pytest.approx(2 * 0.01**2, rel=0.15)
  # The three of a draw are not independent: a standard error is about 0.015.
  assert 0.86 <= np.mean(hits) <= 0.94
  assert np.mean(widths) < 0.1


def test_only_seeds_that_both_have():
  found = {"base": {0: 2.0, 1: 2.5}, "a": {1: 2.4, 2: 9.0}, "b": {3: 1.0}}
  apart = pairs.differences(found, "base")
  assert apart.keys() == {"a"}
  assert apart["a"].by_seed == {1: pytest.approx(-0.1)}
  assert apart["a"].margin is None


def test_rows_of_two_protocols_are_refused():
  rows = [
    {"arm": arm, "seed": "0", "rate": rate, "validation_loss": "2.0"}
    for arm in ("base", "a")
    for rate in ("0.01", "0.02")
  ]
  assert pairs.losses(rows[::2], "arm") == {"base": {0: 2.0}, "a": {0: 2.0}}
  with pytest.raises(config_lib.ConfigError, match="^arm: got 'base', expect"):
    pairs.losses(rows, "arm")


def test_a_control_has_its_own_spread():
  found = {
    "base": {0: 1.0, 1: 1.0},
    "control": {0: 1.001, 1: 0.999},
    "a": {0: 1.1, 1: 0.9},
  }
  apart = pairs.differences(found, "base", control="control")
  assert apart["a"].margin == pytest.approx(100 * apart["control"].margin)
  together = pairs.differences(found, "base")
  assert together["a"].margin == together["control"].margin


def test_contrasts_of_two_arms_have_the_same_coverage():
  rng, hits = np.random.default_rng(1), []
  for _ in range(300):
    found = _losses(rng, 4)
    spread = pairs.pooled(found, "base")
    one = pairs.difference(found["a"], found["b"], spread)
    hits.append(abs(one.mean - (EFFECTS["a"] - EFFECTS["b"])) <= one.margin)
  assert 0.85 <= np.mean(hits) <= 0.95


def test_pairs_of_another_study_join_the_protocol():
  rng = np.random.default_rng(2)
  found = _losses(rng, 5)
  spread = pairs.pooled(found, "base")
  few = {name: {0: found[name][0]} for name in ("base", "a")}
  alone = pairs.differences(few, "base")["a"]
  together = pairs.differences(few, "base", spread=spread)["a"]
  assert alone.margin is None
  assert together.spread == spread and together.mean == alone.mean
  # One pair instead of five.
  of_five = pairs.differences(found, "base", spread=spread)["a"]
  assert together.margin == pytest.approx(5**0.5 * of_five.margin)


def test_runs_that_failed_have_no_interval():
  found = {
    "base": {0: 1.0, 1: 1.0, 2: 1.0},
    "a": {0: 1.01, 1: 0.99},
    "failed": {0: 1.9, 1: 1.5},
    "once": {2: 1.8},
  }
  apart = pairs.differences(found, "base")
  del found["failed"], found["once"]
  assert apart["a"] == pairs.differences(found, "base")["a"]
  assert apart["failed"].margin is None
  assert apart["once"].margin is None


def test_a_variant_far_more_spread_than_all_others_has_its_own():
  rng = np.random.default_rng(0)
  names = "abcdefgh"
  found = {
    name: dict(enumerate(rng.normal(1.0, 0.01, 2))) for name in ("base", *names)
  }
  calm = pairs.differences(found, "base")
  found["wild"] = {0: 1.2, 1: 1.0}
  apart = pairs.differences(found, "base")
  for name in names:
    assert apart[name].margin == calm[name].margin
  assert apart["wild"].margin > 10 * calm["a"].margin


def test_equal_variants_seldom_have_a_spread_of_their_own():
  rng, alone = np.random.default_rng(0), 0
  for _ in range(600):
    own = {n: dict(enumerate(rng.normal(0, 0.01, 2))) for n in "0abcdefghi"}
    apart = pairs.differences(own, "0")
    alone += len({one.spread.deviation for one in apart.values()}) > 1
  # One in a hundred, and somewhat fewer as pairs share their baseline.
  assert alone <= 12
