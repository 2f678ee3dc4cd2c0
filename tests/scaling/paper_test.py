# SPDX-License-Identifier: Apache-2.0
"""The published numbers against each other."""

import itertools

import numpy as np
import pytest

from attnres_jax.scaling import architecture
from attnres_jax.scaling import compute_advantage
from attnres_jax.scaling import fit_power_law
from attnres_jax.scaling import paper

LAWS = paper.PUBLISHED_LAWS
SIX_ND = [0.521, 0.760, 1.276, 2.661, 4.363]
# What the printed baseline law says about the compute of the rows.
INVERTED = [0.693, 0.964, 1.795, 3.319, 5.328]
REFITS = {
  "prenorm": (1.8622, 0.0549),
  "block_attnres": (1.8411, 0.0565),
  "full_attnres": (1.8354, 0.0558),
  "mhc_lite": (1.8384, 0.0549),
}


def column(counting):
  return np.array([size.compute(counting) for size in paper.TABLE_2])


def test_printed_laws_give_the_printed_losses():
  at = {name: round(law(5.6), 5) for name, law in LAWS.items()}
  assert at == {
    "prenorm": 1.71413,
    "block_attnres": 1.69218,
    "full_attnres": 1.69057,
  }
  for name, loss in paper.PUBLISHED_LOSSES.items():
    assert round(LAWS[name](paper.PUBLISHED_COMPUTE), 3) == loss


def test_printed_laws_give_the_printed_advantage():
  base, block, full = LAWS.values()
  equivalent = base.invert(block(5.6))
  assert round(equivalent, 3) == 7.021
  advantage = compute_advantage(base, block, 5.6)
  assert advantage.value == pytest.approx(equivalent / 5.6)
  assert round(advantage.value, 4) == 1.2538
  assert round(advantage.value, 2) == paper.PUBLISHED_ADVANTAGE
  assert advantage.low is None and advantage.high is None


def test_compute_of_table_2():
  six_nd = column("6nd")
  assert [round(c, 3) for c in six_nd.tolist()] == pytest.approx(
    SIX_ND, abs=6e-4
  )
  losses = np.array([size.loss("prenorm") for size in paper.TABLE_2])
  inverted = LAWS["prenorm"].invert(losses)
  assert [round(c, 3) for c in inverted.tolist()] == INVERTED
  ratios = inverted / six_nd
  assert (round(ratios.min(), 2), round(ratios.max(), 2)) == (1.22, 1.41)
  ratios = column("attention") / six_nd
  assert (round(ratios.min(), 2), round(ratios.max(), 2)) == (1.19, 1.28)


@pytest.mark.parametrize("scheme", paper.SCHEMES)
def test_refit_of_table_2_on_6nd(scheme):
  runs = paper.runs(scheme, "6nd")
  law = fit_power_law(runs.compute, runs.loss)
  assert (round(law.coefficient, 4), round(law.exponent, 4)) == REFITS[scheme]
  assert np.max(np.abs(law(runs.compute) - runs.loss)) <= 0.011


def test_refit_with_attention_is_close_to_the_printed_laws():
  for scheme, printed in LAWS.items():
    distances = {}
    for counting in ("6nd", "attention"):
      runs = paper.runs(scheme, counting)
      law = fit_power_law(runs.compute, runs.loss)
      distances[counting] = abs(law.coefficient - printed.coefficient)
    assert distances["attention"] < 0.0075 < 0.025 < distances["6nd"]


def test_depth_attention_costs_little():
  base = column("attention")
  for scheme, most in (("block_attnres", 1.002), ("full_attnres", 1.003)):
    ratio = paper.runs(scheme, "residual").compute / base
    assert np.all(ratio > 1) and np.all(ratio < most)
  np.testing.assert_array_equal(paper.runs("prenorm", "residual").compute, base)
  assert np.all(paper.runs("mhc_lite", "residual").compute > base)


@pytest.mark.slow
def test_fig_7_cells_are_near_their_ratios_and_of_one_size():
  grid = itertools.product(paper.WIDTHS_PER_LAYER, paper.HEADS_PER_LAYER)
  assert [(c.width_per_layer, c.heads_per_layer) for c in paper.FIG_7] == [
    *grid
  ]
  for cell in paper.FIG_7:
    shape = cell.model
    active = architecture.active_params(shape)
    assert abs(active / paper.SWEEP_ACTIVE_PARAMS - 1) <= 0.02
    assert shape.width % 16 == 0 and shape.moe.expert_width % 16 == 0
    assert shape.moe.expert_width / shape.width == pytest.approx(0.45, abs=0.02)
    ratio = shape.width / shape.num_layers
    assert ratio == pytest.approx(cell.width_per_layer, rel=0.12)
    ratio = shape.num_heads / shape.num_layers
    assert ratio == pytest.approx(cell.heads_per_layer, abs=0.035)
    assert cell.tokens == pytest.approx(47e9, rel=0.025)


def test_fig_7_optima_are_cells():
  cells = {(c.width_per_layer, c.heads_per_layer) for c in paper.FIG_7}
  optima = paper.FIG_7_OPTIMA
  for best in optima.values():
    assert (best.width_per_layer, best.heads_per_layer) in cells
  gain = optima["prenorm"].loss - optima["full_attnres"].loss
  assert paper.FIG_7_GAINS[0] <= gain <= paper.FIG_7_GAINS[1]
