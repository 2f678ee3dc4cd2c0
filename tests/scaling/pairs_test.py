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
  found = {"base": dict(enumerate(shared + rng.normal(0, 0.01, seeds)))}
  for name, effect in EFFECTS.items():
    noise = 0.01 * (noisier if name == "a" else 1)
    found[name] = dict(enumerate(shared + effect + rng.normal(0, noise, seeds)))
  return found


@pytest.mark.parametrize("seeds", [2, 3, 6])
@pytest.mark.parametrize("noisier", [1, 2, 5])
def test_coverage(seeds, noisier):
  """Of a variant as noisy as the others or noisier, and of the others."""
  rng = np.random.default_rng(0)
  hits, deviations = [], []
  for _ in range(300):
    found = pairs.differences(_losses(rng, seeds, noisier), "base")
    hits.append(
      [
        abs(found[name].mean - effect) <= found[name].margin
        for name, effect in EFFECTS.items()
      ]
    )
    square = np.var([*found["b"].by_seed.values()], ddof=1)
    deviations.append(square)
  # A difference has the noise of two runs.
  assert np.mean(deviations) == pytest.approx(2 * 0.01**2, rel=0.15)
  noisy, *others = np.mean(hits, axis=0)
  # Within 0.05 of 0.9, and twice a standard error.
  np.testing.assert_allclose(noisy, 0.9, atol=0.05 + 0.035)
  np.testing.assert_allclose(np.mean(others), 0.9, atol=0.05 + 0.025)


def test_a_variant_as_noisy_as_others_profits_from_them():
  """Its intervals are narrower than from its own three pairs."""
  rng, own, together = np.random.default_rng(5), [], []
  for _ in range(100):
    found = _losses(rng, 3)
    own.append(pairs.difference(found["a"], found["base"]).margin)
    together.append(pairs.differences(found, "base")["a"].margin)
  assert np.mean(together) < 0.95 * np.mean(own)


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
  assert together["control"].margin > 30 * apart["control"].margin


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
  # One pair instead of five, whose deviation is the protocol's.
  of_five = pairs.Difference(found["a"], spread)
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


def test_a_variant_far_more_spread_than_all_others_leaves_theirs_alone():
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


def test_equal_variants_seldom_leave_the_protocol():
  rng, changed = np.random.default_rng(0), 0
  for _ in range(300):
    found = {n: dict(enumerate(rng.normal(0, 0.01, 2))) for n in "0abcdefghi"}
    spread = pairs.pooled(found, "0")
    squares = [np.var([o[s] - found["0"][s] for s in (0, 1)], ddof=1)
               for n, o in found.items() if n != "0"]  # fmt: skip
    changed += not np.isclose(spread.deviation**2, np.mean(squares))
  # One in a hundred, and somewhat fewer as pairs share their baseline.
  assert changed <= 6


@pytest.mark.parametrize("loss", ["nan", "inf", "-1", "0", ""])
def test_what_is_no_loss_is_refused(loss):
  rows = [{"arm": "base", "seed": "0", "validation_loss": loss}]
  with pytest.raises(ValueError, match="^validation_loss: got"):
    pairs.losses(rows, "arm")
