# SPDX-License-Identifier: Apache-2.0
"""The shapes of the architecture sweep, and its report."""

import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.flops import parameters
from attnres_jax.scaling import architecture
from attnres_jax.scaling import grid
from attnres_jax.scaling import paper
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import monitor
from experiments.arch_sweep import report

SPEC = "configs/arch_sweep.py"


def _active(model):
  count = parameters.total(parameters.of_parts(model), "embedding", "head")
  # Selection biases are no parameters of Table 2.
  return count.active - count.state


def _configs(spec):
  return [folder_lib.run_config(run) for run in grid.load(spec)]


@pytest.mark.more
def test_laptop_shapes_have_one_size():
  configs = _configs(SPEC)
  assert len(configs) == 5 * 3 * 2
  prenorm = [c for c in configs if c.model.residual.name == "prenorm"]
  sizes = np.array([_active(c.model) for c in prenorm])
  np.testing.assert_allclose(sizes, 118_000, rtol=0.02)
  assert len({c.train.steps for c in configs}) == 1
  shapes = {
    (c.model.width, c.model.num_layers, c.model.num_heads) for c in configs
  }
  assert len(shapes) == 15
  for run, config in zip(grid.load(SPEC), configs):
    rho = config.model.width / config.model.num_layers
    assert run.overrides["rho"] == pytest.approx(rho, abs=0.05)
    eta = config.model.num_heads / config.model.num_layers
    assert run.overrides["eta"] == pytest.approx(eta, abs=0.085)


@pytest.mark.slow
def test_paper_shapes_are_those_of_figure_7():
  configs = _configs(f"{SPEC}:scale=paper")
  assert len(configs) == 25 * 2
  for config, cell in zip(configs[::2], paper.FIG_7, strict=True):
    assert _active(config.model) == architecture.active_params(cell.model)
    tokens = (
      config.train.steps * config.data.batch_size * config.data.sequence_length
    )
    flops = 6 * _active(config.model) * tokens
    assert flops == pytest.approx(paper.SWEEP_FLOPS, rel=1e-3)
  # Both schemes of a shape, on the same data.
  for prenorm, attnres in zip(configs[::2], configs[1::2]):
    differing = config_lib.differences(
      config_lib.to_dict(prenorm), config_lib.to_dict(attnres)
    )
    assert set(differing) == {"name", "model.residual.name"}


def test_unknown_shapes():
  with pytest.raises(config_lib.ConfigError, match="config.rho: got 5.0, exp"):
    config_lib.load_config(f"{SPEC}:rho=5")
  with pytest.raises(config_lib.ConfigError, match=r"eta: got \(15.0, 0.55"):
    config_lib.load_config(f"{SPEC}:scale=paper,rho=15,eta=0.55")


def test_shapes_without_a_pair_or_with_two_seeds(tmp_path):
  rows = [
    {"residual": scheme, "rho": rho, "eta": eta, "validation_loss": loss}
    for scheme, rho, eta, loss in (
      ("prenorm", "2.3", "0.25", "2.5"),
      ("full_attnres", "2.3", "0.25", "2.4"),
      ("prenorm", "12.0", "0.5", "2.5"),
      ("prenorm", "12.0", "0.5", "2.7"),  # Another seed.
      ("full_attnres", "12.0", "0.5", "2.65"),
      ("prenorm", "12.0", "0.25", "2.7"),
    )
  ]
  prenorm = report.means(rows)["prenorm"].unstack()
  assert [*prenorm.index] == [2.3, 12.0] and [*prenorm] == [0.25, 0.5]
  np.testing.assert_array_equal(prenorm, [[2.5, np.nan], [2.7, 2.6]])
  assert "lower in 1 of 2 shapes" in report.gains(rows)
  assert "| 12 | 0.25 | 2.7000 |  |  |" in report.table(rows).markdown()
  assert report.gains([]).startswith("No shape has been trained")

  runs = folder_lib.prepare(tmp_path, grid.load(SPEC), SPEC)
  page = report.PUBLISHED.render(tmp_path, monitor.of_folder(tmp_path))
  assert f"0/{len(runs)} done" in page and "Heatmaps appear" in page
