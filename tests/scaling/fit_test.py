# SPDX-License-Identifier: Apache-2.0
"""Known laws are recovered, with intervals of the right coverage."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from attnres_jax.common import csv_rows
from attnres_jax.scaling import compute_advantage
from attnres_jax.scaling import effective_speedup
from attnres_jax.scaling import fit
from attnres_jax.scaling import fit_power_law
from attnres_jax.sweep import rows as rows_lib
from tests import tiny_run

COMPUTE = np.geomspace(1e-6, 1e-3, 6)
ONE = fit.PowerLaw(1.0, 1.0)


def planted(law, rng, *, noise=0.004, seeds=3, common=None):
  """Runs of a law with relative noise; `common` is shared by schemes."""
  sizes = np.repeat(np.arange(len(COMPUTE)), seeds)
  error = rng.normal(0, noise, len(sizes)) + (0 if common is None else common)
  compute = COMPUTE[sizes]
  return fit.Runs(
    compute,
    law(compute) * np.exp(error),
    tuple(sizes.tolist()),
    tuple(np.tile(np.arange(seeds), len(COMPUTE)).tolist()),
  )


def test_least_squares_is_the_normal_equations():
  rng = np.random.default_rng(0)
  loss = 2 * COMPUTE**-0.05 * np.exp(rng.normal(0, 0.01, len(COMPUTE)))
  law = fit_power_law(COMPUTE, loss)
  slope, height = np.polyfit(np.log(COMPUTE), np.log(loss), 1)
  assert law.exponent == pytest.approx(-slope)
  assert law.coefficient == pytest.approx(np.exp(height))


def test_units_of_compute_change_the_coefficient_only():
  law = fit.PowerLaw(0.7, 0.11)
  refit = fit_power_law(COMPUTE * 1e21, law(COMPUTE))
  assert refit.exponent == pytest.approx(law.exponent, rel=1e-4)
  assert refit(COMPUTE[2] * 1e21) == pytest.approx(law(COMPUTE[2]))


def test_invert():
  law = fit.PowerLaw(0.7, 0.11)
  np.testing.assert_allclose(law.invert(law(COMPUTE)), COMPUTE)
  flat = fit.PowerLaw(3.0, 0.0)
  assert flat.invert(2.9) == float("inf") and flat.invert(3.1) == 0


def test_advantage_of_planted_laws():
  base = fit.PowerLaw(1.5, 0.06)
  # The same slope: the ratio of coefficients, to the power of 1 / exponent.
  other = fit.PowerLaw(1.5 * 1.25**-0.06, 0.06)
  for compute in (1e-6, 1.0, 1e3):
    assert compute_advantage(base, other, compute).value == pytest.approx(1.25)
  assert compute_advantage(base, base, 3.0).value == pytest.approx(1)


def hits(counts, rng, *, off_law, noise):
  """Whether the intervals of a table contain the truth; None without.

  Of the baseline's exponent, another scheme's loss at the largest size, and its
  advantage there. `counts` are runs per size, `off_law` is an error that all
  runs of a size share, and `noise` that of a run of each scheme.
  """
  laws = {"base": fit.PowerLaw(0.6, 0.1), "other": fit.PowerLaw(0.59, 0.1)}
  compute = np.geomspace(1e-6, 1e-4, len(counts))
  size = np.repeat(np.arange(len(counts)), counts)
  seed = np.concatenate([np.arange(count) for count in counts])
  off = rng.normal(0, off_law, len(counts))[size]
  runs = {
    name: fit.Runs(
      compute[size],
      law(compute[size]) * np.exp(off + rng.normal(0, noise[name], len(size))),
      tuple(size.tolist()), tuple(seed.tolist()),
    )
    for name, law in laws.items()
  }  # fmt: skip
  fits, last = fit.fit_schemes(runs, rng, num_samples=100), compute[-1]
  estimates = (
    fits["base"].exponent(),
    fits["other"].loss(last),
    compute_advantage(fits["base"], fits["other"], last),
  )
  if estimates[0].low is None:
    assert all(e.low is e.high is None for e in estimates)
    return None
  truth = (
    0.1, laws["other"](last), compute_advantage(*laws.values(), last).value
  )  # fmt: skip
  return [e.low <= true <= e.high for e, true in zip(estimates, truth)]


@pytest.mark.parametrize(
  "counts", [(1,) * 3, (1,) * 5, (3,) * 4, (3, 3, 1)], ids=str
)
@pytest.mark.parametrize(
  "off_law,noisier", [(0, 1), (0.006, 1), (0, 5)], ids=["seeds", "off", "noisy"]
)
def test_intervals_cover_as_often_as_they_say(counts, off_law, noisier):
  rng = np.random.default_rng(3)
  noise = {"base": 0.003, "other": 0.003 * noisier}
  covered = np.mean(
    [hits(counts, rng, off_law=off_law, noise=noise) for _ in range(100)],
    axis=0,
  )
  # Nominal 0.9, within 0.05 and twice the standard error of 100 tables.
  np.testing.assert_array_less(abs(covered - 0.9), 0.05 + 2 * 0.03)


@pytest.mark.parametrize("counts", [(1, 1), (3, 1), (2, 2), (9, 9)], ids=str)
def test_two_sizes_have_no_interval(counts):
  rng = np.random.default_rng(4)
  noise = {"base": 0.003, "other": 0.003}
  assert hits(counts, rng, off_law=0, noise=noise) is None


def test_a_diverged_run_is_named():
  rng = np.random.default_rng(8)
  law = fit.PowerLaw(1.5, 0.06)
  good = planted(law, rng)
  for i in (0, 7, len(good.loss) - 1):
    loss = good.loss.copy()
    loss[i] = 9.0
    bad = fit.Runs(good.compute, loss, good.size, good.seed)
    where = f"loss: got '9 of size {good.size[i]}, seed {good.seed[i]}'"
    for call in (
      lambda bad=bad: fit.fit_schemes({"a": good, "b": bad}, rng),
      lambda bad=bad: effective_speedup(good, bad),
      lambda bad=bad: effective_speedup(bad, good),
    ):
      with pytest.raises(ValueError, match=f"^{where}"):
        call()
    rest, left_out = fit.without_failed(bad)
    assert left_out == [i] and len(rest.loss) == len(loss) - 1
    fit.fit_schemes({"a": good, "b": rest}, rng, num_samples=2)


def test_no_healthy_table_has_a_diverged_run():
  """Whether losses are on a law, off it, or fall to a floor."""
  rng = np.random.default_rng(9)
  for _ in range(300):
    off = rng.normal(0, 0.01, len(COMPUTE)).repeat(3)
    floor = rng.uniform(0, 2)
    runs = planted(fit.PowerLaw(1.5, 0.06), rng, common=off)
    runs = fit.Runs(runs.compute, runs.loss + floor, runs.size, runs.seed)
    assert not fit.failed(runs)


def test_no_run_of_the_scaling_sweep_has_diverged():
  """One ends 0.4 nats above its law: it has trained, and it counts."""
  rows = csv_rows.read(tiny_run.ROOT / "experiments/scaling_law/results.csv")
  schemes = rows_lib.by_scheme(rows, "6nd")
  assert len(schemes) == 4
  assert not any(map(fit.failed, schemes.values()))
  block = schemes["block_attnres"]
  worst = int(np.argmax(block.loss))
  assert block.size[worst] == ("size=s",) and block.seed[worst] == 1
  loss = block.loss.copy()
  loss[worst] = 5.5  # That of a network that has learned nothing.
  runs = fit.Runs(block.compute, loss, block.size, block.seed)
  assert fit.failed(runs) == [worst]


def test_schemes_share_their_draws():
  rng = np.random.default_rng(4)
  base, other = fit.PowerLaw(1.5, 0.06), fit.PowerLaw(1.48, 0.06)
  # Sizes and seeds that are bad for both by far more than they differ.
  common = rng.normal(0, 0.02, 18)
  runs = {
    "base": planted(base, rng, noise=1e-4, common=common),
    "other": planted(other, rng, noise=1e-4, common=common),
  }
  together = fit.fit_schemes(runs, np.random.default_rng(5), num_samples=200)
  advantage = compute_advantage(together["base"], together["other"], 1e-4)
  truth = compute_advantage(base, other, 1e-4).value
  assert advantage.low <= truth <= advantage.high
  single = [
    fit.fit_schemes({name: runs[name]}, np.random.default_rng(6 + i),
                    num_samples=200)[name]
    for i, name in enumerate(runs)
  ]  # fmt: skip
  apart = compute_advantage(*single, 1e-4)
  width = advantage.high - advantage.low
  assert 0 < width < 0.2 * (apart.high - apart.low)


def test_sizes_that_agree_by_chance_do_not_hide_the_seeds():
  """The interval is that of least squares of runs, with the seeds' variance."""
  law, seeds = fit.PowerLaw(1.5, 0.06), 4
  runs = planted(law, np.random.default_rng(13), noise=0.01, seeds=seeds)
  apart = np.log(runs.loss / law(runs.compute)).reshape(-1, seeds)
  apart -= apart.mean(axis=1, keepdims=True)  # All means are on the law.
  runs = dataclasses.replace(
    runs, loss=law(runs.compute) * np.exp(apart.ravel())
  )
  rng = np.random.default_rng(14)
  exponent = fit.fit_schemes({"a": runs}, rng, num_samples=4000)["a"].exponent()
  freedom = apart.size - len(apart)
  x = np.log(runs.compute)
  error = np.sqrt(np.sum(apart**2) / freedom / np.sum((x - x.mean()) ** 2))
  half = stats.t.ppf((1 + fit.level_of_each(0.9)) / 2, freedom) * error
  assert exponent.value == pytest.approx(law.exponent)
  np.testing.assert_allclose(
    (exponent.low, exponent.high), (law.exponent - half, law.exponent + half),
    atol=0.1 * half,
  )  # fmt: skip


@pytest.mark.usefixtures("any_arguments")
@pytest.mark.parametrize(
  "call,message",
  [
    (lambda: fit_power_law([1, 2], [3]), "loss: got '1 values'"),
    (lambda: fit_power_law([2, 2], [3, 2]), r"compute: got \[2.0, 2.0\]"),
    (lambda: fit_power_law([1, 0], [3, 2]), "compute: got 0.0"),
    (lambda: fit_power_law([1, 2], [3, float("nan")]), "loss: got nan"),
    (lambda: fit_power_law([[1, 2]], [[3, 2]]), r"compute: got \[\[1.0, 2.0"),
    (lambda: fit.Runs([1, 2], [3, 2], ("s", "s"), (0, 0)), "seed: got"),
    (lambda: fit.Runs([1, 2], [3, 2], ("s",), (0, 0)), "size: got"),
    (lambda: compute_advantage(ONE, ONE, 0), "compute: got 0"),
    (
      lambda: compute_advantage(fit.Fit(ONE), fit.Fit(ONE, (ONE,)), 1),
      "other: got '1 draws'",
    ),
    (lambda: fit.Fit(ONE).exponent(90), "level: got 90"),
  ],
)
def test_bad_arguments_are_named(call, message):
  with pytest.raises(ValueError, match=f"^{message}"):
    call()
