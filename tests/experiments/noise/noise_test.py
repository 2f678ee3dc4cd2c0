# SPDX-License-Identifier: Apache-2.0
"""Planted sources of noise are told apart; the sweep crosses what it says."""

import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.scaling import grid
from attnres_jax.sweep import folder as folder_lib
from experiments.noise import config as noise
from experiments.noise import report

SPEC = "experiments/noise/config.py"
WEIGHTS, ORDER, REST, ROUNDING = 0.03, 0.01, 0.004, 0.002
EFFECT = -0.02


def _rows(seeds=200):
  """Seeds in twos that have each other's order of the data, too."""
  rng = np.random.default_rng(0)
  weights, order = rng.normal(0, WEIGHTS, seeds), rng.normal(0, ORDER, seeds)
  rows = []

  def add(residual, seed, data_seed, loss, epsilon=""):
    rows.append(
      {
        "recipe": "settled", "rows": "4", "rate": "0.006",
        "residual": residual, "seed": str(seed), "data.seed": str(data_seed),
        "model.norm_eps": epsilon, "validation_loss": f"{loss:.9f}",
        "last_weights_loss": f"{loss + 0.01:.9f}", "seconds": "90",
      }
    )  # fmt: skip

  for seed in range(seeds):
    for data_seed in (seed, seed ^ 1):
      base = 2 + weights[seed] + order[data_seed] + rng.normal(0, REST)
      add("prenorm", seed, data_seed, base)
      apart = EFFECT + weights[seed] / 2 + rng.normal(0, REST)
      add("block_attnres", seed, data_seed, base + apart)
      if seed == data_seed:
        error = rng.normal(0, ROUNDING)
        add("prenorm", seed, data_seed, base + error, "2e-9")
  return rows


def test_planted_sources():
  alone, both = report.sources(_rows(seeds=1000)).rows
  assert [float(x) for x in alone[1:]] == pytest.approx(
    [WEIGHTS, ORDER, REST, ROUNDING / np.sqrt(2)], rel=0.1
  )
  weights, order, rest = (float(x) for x in both[1:4])
  assert (weights, rest) == pytest.approx((WEIGHTS / 2, REST), rel=0.1)
  assert order < 0.002 and not both[4]


def test_protocols():
  averaged, last = report.protocols(_rows()).rows
  name, count, alone, _, rounding, other, difference, own, apart, *rest = (
    averaged
  )
  assert name == "settled, 4 rows, rate 0.006" and count == "400"
  assert float(alone) == pytest.approx(2.0, abs=0.01)
  assert float(rounding) == pytest.approx(ROUNDING, rel=0.2)
  spread, needed = float(apart), rest[1]
  assert spread == pytest.approx(np.hypot(WEIGHTS / 2, REST), rel=0.2)
  assert int(needed) == pytest.approx((spread / 0.002) ** 2, rel=0.05)
  assert other == "" and averaged[-1] == "1.5"
  # Of 400 pairs, 200 are independent.
  margin = float(own.split(" ± ")[1])
  assert margin == pytest.approx(1.65 * spread / np.sqrt(200), rel=0.1)
  assert last[0] == f"{name}, last weights" and last[6] == difference


def test_rates_show_averaged_and_last_weights():
  (line,) = report.rates(_rows(seeds=4)).rows
  assert line[:2] == ["4", "0.006"] and line[4] == "8"
  assert float(line[3]) - float(line[2]) == pytest.approx(0.01, abs=1e-3)


def test_all_runs_see_the_same_bytes():
  runs = grid.load(SPEC)
  configs = [folder_lib.run_config(run) for run in runs]
  seen = {c.train.steps * c.data.batch_size for c in configs}
  assert len(seen) == 1
  pairs = noise.pairs(noise.SETTLED, 0)
  base, other, scheme = (
    config_lib.to_dict(configs[[r.overrides for r in runs].index(pair)])
    for pair in pairs
  )
  differing = config_lib.differences(base, other)
  assert set(differing) == {"name", "model.norm_eps"}
  differing = config_lib.differences(base, scheme)
  assert set(differing) == {"name", "model.residual.name"}
