# SPDX-License-Identifier: Apache-2.0
"""Planted speed-ups are recovered, and intervals have their coverage."""

import numpy as np
import pytest
from scipy import stats

from attnres_jax import config as config_lib
from attnres_jax.scaling import effective_speedup
from attnres_jax.scaling import fit
from tests import tiers

COMPUTE = np.geomspace(1e-6, 3e-5, 5)
LAW = fit.PowerLaw(0.4, 0.12)


def runs(loss, compute, sizes, seeds):
  """Runs from arrays [sizes, seeds]."""
  size, seed = np.meshgrid(sizes, seeds, indexing="ij")
  return fit.Runs(
    np.broadcast_to(np.reshape(compute, (-1, 1)), size.shape).ravel(),
    loss.ravel(), tuple(size.ravel().tolist()), tuple(seed.ravel().tolist()),
  )  # fmt: skip


def planted(
  rng, speedup, *, noise=0.0, common=0.0, off_law=0.0, varies=0.0, work=1.0,
  pairs=slice(None), seeds=3,
):  # fmt: skip
  """A baseline and another scheme.

  Args:
    rng: source of the errors, which are relative.
    speedup: of the scheme.
    noise: error of a run.
    common: error that a pair shares.
    off_law: of a size, shared by its pairs.
    varies: of the speed-up's logarithm between sizes.
    work: compute of the scheme, relative to the baseline.
    pairs: sizes at which the scheme has runs.
    seeds: per size.
  """
  shape = len(COMPUTE), seeds
  shared = (
    rng.normal(0, common, shape) + rng.normal(0, off_law, shape[:1])[:, None]
  )
  errors = rng.normal(0, noise, (2, *shape))
  faster = np.exp(np.log(speedup) + rng.normal(0, varies, shape[:1]))[:, None]
  sizes, seed = np.arange(len(COMPUTE)), np.arange(seeds)
  base = LAW(COMPUTE[:, None]) * np.exp(shared + errors[0])
  compute = work * COMPUTE
  other = LAW(compute[:, None] * faster) * np.exp(shared + errors[1])
  return (
    runs(base, COMPUTE, sizes, seed),
    runs(other[pairs], compute[pairs], sizes[pairs], seed),
  )


@pytest.mark.parametrize("work", [1.0, 1.07])
def test_exact_losses_give_the_speedup_back(work):
  rng = np.random.default_rng(0)
  pair = planted(rng, 1.25, work=work)
  np.testing.assert_allclose(effective_speedup(*pair), [1.25] * 3, rtol=1e-6)


def test_what_a_pair_shares_cancels():
  """The error of a size moves the law, and so the speed-up a little."""
  rng = np.random.default_rng(0)
  paired = effective_speedup(*planted(rng, 1.25, common=0.02))
  unpaired = effective_speedup(*planted(rng, 1.25, noise=0.02))
  assert paired.high - paired.low < 0.2 * (unpaired.high - unpaired.low)


@tiers.parametrize(
  "errors",
  [
    dict(noise=0.004, common=0.02),
    dict(noise=0.001, off_law=0.02),
    dict(noise=0.001, varies=0.1),
    dict(noise=0.004, common=0.02, pairs=slice(4, 5), seeds=5),
  ],
  ids=["seeds", "off the law", "varying speed-up", "one size"],
)
def test_coverage(errors):
  """90 % intervals contain the truth in 90 % of all draws."""
  rng = np.random.default_rng(0)
  draws = [effective_speedup(*planted(rng, 1.2, **errors)) for _ in range(300)]
  share = np.mean([e.low <= 1.2 <= e.high for e in draws])
  # Two and a half standard errors of a share of 300 draws are 0.043.
  assert 0.857 <= share <= 0.943
  assert np.median([e.value for e in draws]) == pytest.approx(1.2, rel=0.03)


def test_sizes_that_agree_by_chance_do_not_hide_the_seeds():
  base, other = planted(np.random.default_rng(0), 1.2, noise=0.02)
  ratio = np.log(other.loss / base.loss).reshape(len(COMPUTE), -1)
  by_chance = np.exp(np.mean(ratio) - ratio.mean(axis=1, keepdims=True))
  other = fit.Runs(
    other.compute,
    (other.loss.reshape(ratio.shape) * by_chance).ravel(),
    other.size,
    other.seed,
  )
  speedup = effective_speedup(base, other)
  freedom = ratio.size - len(ratio)
  apart = ratio - ratio.mean(axis=1, keepdims=True)
  error = np.sqrt(np.sum(apart**2) / freedom / ratio.size)
  half = stats.t.ppf(0.93, freedom) * error / LAW.exponent
  # The exponent is uncertain, too; and quantiles are of 100 x 100 values.
  assert 0.95 * half < np.log(speedup.high / speedup.value) < 2 * half
  assert 0.95 * half < np.log(speedup.value / speedup.low) < 2 * half


def test_an_unknown_slope_gives_an_infinite_interval():
  rng = np.random.default_rng(0)
  base, other = planted(rng, 1.2, noise=0.001)
  off_law = np.exp([[0.2], [-0.2], [0.2], [-0.2], [0.2]] * np.ones(3)).ravel()
  speedup = effective_speedup(
    *(
      fit.Runs(r.compute, r.loss * off_law, r.size, r.seed)
      for r in (base, other)
    )
  )
  assert 1 < speedup.low < 1.2 and speedup.high == float("inf")


TWO_COMPUTES = runs(np.ones((2, 1)), [1, 2], [0, 1], [0])
UNPAIRED = runs(np.ones((1, 2)), [1], ["x"], [0, 1])
RISING = runs(np.array([[1.0], [2], [3]]), [1, 2, 3], [0, 1, 2], [0])


@pytest.mark.parametrize(
  "base, other, message",
  [
    (TWO_COMPUTES, None, "2 computes"),
    (None, UNPAIRED, "0 pairs"),
    (RISING, None, "rises as"),
  ],
)
def test_too_little_is_refused(base, other, message):
  pair = planted(np.random.default_rng(0), 1.2, noise=0.01)
  with pytest.raises(config_lib.ConfigError, match=message):
    effective_speedup(base or pair[0], other or pair[1])


def test_levels_are_checked():
  pair = planted(np.random.default_rng(0), 1.2, noise=0.01)
  with pytest.raises(config_lib.ConfigError, match="level"):
    effective_speedup(*pair, level=1.5)
  narrow, wide = (
    effective_speedup(*pair, level=level) for level in (0.5, 0.95)
  )
  assert wide.low < narrow.low < narrow.value < narrow.high < wide.high
