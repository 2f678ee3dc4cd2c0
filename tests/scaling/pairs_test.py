# SPDX-License-Identifier: Apache-2.0
"""Intervals of paired differences contain the truth as often as they say."""

import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.scaling import pairs

EFFECTS = {"a": -0.02, "b": 0.01, "c": 0.0}


def _losses(rng, seeds, noisier=1):
  """Large noise that pairs share, and a little that they do not: more of a."""
  shared = rng.normal(2.0, 0.3, seeds)
  arms = {"base": dict(enumerate(shared + rng.normal(0, 0.01, seeds)))}
  for name, effect in EFFECTS.items():
    noise = 0.01 * (noisier if name == "a" else 1)
    arms[name] = dict(enumerate(shared + effect + rng.normal(0, noise, seeds)))
  return arms


@pytest.mark.parametrize("seeds", [2, 3, 6])
@pytest.mark.parametrize("noisier", [1, 2, 5])
def test_coverage(seeds, noisier):
  """Intervals cover the others and a variant that is as noisy, or noisier."""
  rng = np.random.default_rng(0)
  hits, deviations = [], []
  for _ in range(300):
    apart = pairs.differences(_losses(rng, seeds, noisier), "base")
    hits.append(
      [
        abs(apart[name].mean - effect) <= apart[name].margin
        for name, effect in EFFECTS.items()
      ]
    )
    square = np.var([*apart["b"].by_seed.values()], ddof=1)
    deviations.append(square)
  # A difference has the noise of two runs.
  assert np.mean(deviations) == pytest.approx(2 * 0.01**2, rel=0.15)
  noisy, *others = np.mean(hits, axis=0)
  # Within 0.05 of 0.9, and twice a standard error.
  np.testing.assert_allclose(noisy, 0.9, atol=0.05 + 0.035)
  np.testing.assert_allclose(np.mean(others), 0.9, atol=0.05 + 0.025)


def test_only_seeds_that_both_have():
  arms = {"base": {0: 2.0, 1: 2.5}, "a": {1: 2.4, 2: 9.0}, "b": {3: 1.0}}
  apart = pairs.differences(arms, "base")
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
  arms = {
    "base": {0: 1.0, 1: 1.0},
    "control": {0: 1.001, 1: 0.999},
    "a": {0: 1.1, 1: 0.9},
  }
  apart = pairs.differences(arms, "base", control="control")
  assert apart["a"].margin == pytest.approx(100 * apart["control"].margin)
  together = pairs.differences(arms, "base")
  assert together["control"].margin > 30 * apart["control"].margin


def test_pairs_of_another_study_join_the_protocol():
  rng = np.random.default_rng(2)
  arms = _losses(rng, 5)
  spread = pairs.pooled(arms, "base")
  few = {name: {0: arms[name][0]} for name in ("base", "a")}
  unpooled = pairs.differences(few, "base")["a"]
  together = pairs.differences(few, "base", spread=spread)["a"]
  assert unpooled.margin is None
  assert together.spread == spread and together.mean == unpooled.mean
  # One pair instead of five, whose deviation is the protocol's.
  of_five = pairs.Difference(arms["a"], spread)
  assert together.margin == pytest.approx(5**0.5 * of_five.margin)


def test_runs_that_failed_have_no_interval():
  arms = {
    "base": {0: 1.0, 1: 1.0, 2: 1.0},
    "a": {0: 1.01, 1: 0.99},
    "failed": {0: 1.9, 1: 1.5},
    "once": {2: 1.8},
  }
  apart = pairs.differences(arms, "base")
  del arms["failed"], arms["once"]
  assert apart["a"] == pairs.differences(arms, "base")["a"]
  assert apart["failed"].margin is None
  assert apart["once"].margin is None


def test_a_variant_far_more_spread_than_all_others_leaves_theirs_alone():
  rng = np.random.default_rng(0)
  names = "abcdefgh"
  arms = {
    name: dict(enumerate(rng.normal(1.0, 0.01, 2))) for name in ("base", *names)
  }
  calm = pairs.differences(arms, "base")
  arms["wild"] = {0: 1.2, 1: 1.0}
  apart = pairs.differences(arms, "base")
  for name in names:
    assert apart[name].margin == calm[name].margin
  assert apart["wild"].margin > 10 * calm["a"].margin


def test_equal_variants_seldom_leave_the_protocol():
  rng, changed = np.random.default_rng(0), 0
  for _ in range(300):
    arms = {n: dict(enumerate(rng.normal(0, 0.01, 2))) for n in "0abcdefghi"}
    spread = pairs.pooled(arms, "0")
    squares = [np.var([o[s] - arms["0"][s] for s in (0, 1)], ddof=1)
               for n, o in arms.items() if n != "0"]  # fmt: skip
    changed += not np.isclose(spread.deviation**2, np.mean(squares))
  # One in a hundred, and somewhat fewer as pairs share their baseline.
  assert changed <= 6


@pytest.mark.parametrize("loss", ["nan", "inf", "-1", "0", ""])
def test_what_is_no_loss_is_refused(loss):
  rows = [{"arm": "base", "seed": "0", "validation_loss": loss}]
  with pytest.raises(ValueError, match="^validation_loss: got"):
    pairs.losses(rows, "arm")
