# SPDX-License-Identifier: Apache-2.0
"""The scheme and the mixer of docs/extend.md, which the library lacks.

Each is a class and one line that registers it. Everything else follows:
training, FLOPs, meshes, optimisers, pipelines, compilation for TPUs, sweeps,
tables and figures.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest

from attnres_jax import analysis
from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax import models
from attnres_jax import optimizer
from attnres_jax.common import sharding
from attnres_jax.config import describe
from attnres_jax.flops import parameters
from attnres_jax.flops import report as flops_report
from attnres_jax.flops import traffic
from attnres_jax.models import residuals
from attnres_jax.models import sublayer
from attnres_jax.scaling import fit as fit_lib
from attnres_jax.scaling import plots
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import monitor
from attnres_jax.sweep import rows as rows_lib
from attnres_jax.sweep import work
from attnres_jax.train import train_state
from tests.docs import extend_test
from tests.sweep import tiny_sweep

WIDTH, LENGTH, LAYERS = 16, 32, 2


@pytest.fixture(autouse=True)
def registered(monkeypatch):
  # Undone after each test, as are the lines of the page.
  monkeypatch.setitem(residuals.RESIDUALS, "damped", None)
  monkeypatch.setitem(residuals.RESIDUALS, "fading", None)
  monkeypatch.setitem(sublayer.CORES, "shift", None)
  monkeypatch.setitem(optimizer.OPTIMIZERS, "lion", None)
  page = "extend.md"
  extend_test.run(page, "Add a scheme", RESIDUALS=residuals.RESIDUALS)
  extend_test.run(page, "Add a mixer", CORES=sublayer.CORES)
  optimizers = optimizer.OPTIMIZERS
  extend_test.run(page, "Add an optimiser", OPTIMIZERS=optimizers)


def _config(**fields):
  fields = {
    "model.width": WIDTH,
    "model.num_layers": LAYERS,
    "model.num_heads": 2,
    "model.mlp_width": 24,
    "model.mixers": ("attention", "shift"),
    "model.vocab_size": 260,
    "data.sequence_length": LENGTH,
    "data.batch_size": 8,
    "optim.name": "muon",
    "optim.warmup_steps": 1,
    "mesh.data": 1,
  } | fields
  return config_lib.load_config("configs/lm.py:residual=damped", fields)


def _step(config):
  mesh = sharding.make_mesh(config.mesh)
  program = train_state.make_program(config, mesh)
  rng = np.random.default_rng(0)
  shape = config.data.batch_size, config.data.sequence_length + 1
  tokens = rng.integers(0, 256, shape, dtype=np.int32)
  batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens)}
  batch = sharding.shard_batch(batch, mesh)
  state, metrics = program.train_step(program.init_state(), batch)
  return program, jax.device_get(state.model), jax.device_get(metrics)


def test_flops_parameters_and_bytes_are_counted():
  config = _config()
  counts = flops.make_report(config)
  text = flops_report.to_text(counts)
  assert "damped" in text and "shift" in text and "factor" not in text
  # Without a mixer that can decode.
  shifted = flops.make_report(_config(**{"model.mixers": ("shift",)}))
  assert "kept while decoding" in flops_report.to_text(shifted)
  count = flops.flops_per_token(config.model, LENGTH)
  # No products; attention with as many heads as keys, then three matrices.
  assert count.residual == 0
  attention, shift = 4 * WIDTH**2, 3 * WIDTH**2
  assert count.projections == 2 * (attention + shift)
  parts = parameters.of_parts(config.model)
  assert parts["shift"].active == shift
  assert parts["residual"].total == 2 * LAYERS * WIDTH
  # The sum and an output in, the sum out, which is the next input.
  assert traffic.of_scheme(config.model) == traffic.Traffic(reads=2, writes=1)


def test_options_of_a_scheme_are_fields_flags_and_help():
  """They are declared in its file, and nowhere else."""
  spec = "configs/lm.py:residual=fading"
  flags = {"model.residual.start": "0.5", "model.residual.learns": "no"}
  source = config_lib.Source(spec, flags)
  config = source.load()
  model = models.build_model(config.model)
  np.testing.assert_array_equal(model.residual.factor[...], 0.5)
  _, slots = model.residual.open(None, 0, 2)
  assert not model.residual.learns and slots.shape[0] == 2
  again = config_lib.build_run_config(json.loads(config_lib.to_json(config)))
  assert again.model.residual == config.model.residual
  names = {f"model.residual.{name}" for name in ("start", "learns")}
  text = describe.to_text("model.residual", config)
  assert all(f"--config.{name}=" in text for name in names)
  assert "number from 0 to 1" in text and "all factors start" in text
  assert not any(name in describe.to_text() for name in names)
  effects = [config_lib.affects(name) for name in sorted(names)]
  assert effects == [{"function", "step"}, {"draw"}]
  for given, message in (
    ((spec, {"model.residual.start": 1.5}), "got 1.5, expected a number from"),
    (("configs/lm.py", {"model.residual.start": 0.5}), "got 0.5, expected 1.0"),
    (("configs/lm.py", {"model.residual.start": 1.0}), "got 1.0, expected no"),
  ):
    with pytest.raises(config_lib.ConfigError) as error:
      config_lib.load_config(*given)
    assert str(error.value).startswith(
      f"config.model.residual.start: {message}"
    )


def test_letters_say_how_to_train_and_cut_it():
  model = train_state.make_program(
    config := _config(), sharding.make_mesh(config.mesh)
  ).abstract_state.model
  core = optimizer.matrices(model).sublayers["shift"].core
  assert core.now.get_value() and core.output.get_value()
  assert not any(jax.tree.leaves(optimizer.decays(model).residual))
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1, fsdp=2, tensor=2))
  cut = sharding.state_sharding(model, mesh).sublayers["shift"].core
  assert cut.output.get_value().spec == jax.P(
    None, sharding.TENSOR, None, (sharding.FSDP, sharding.STAGE)
  )


def test_its_optimiser_moves_matrices_by_the_rate():
  """The first step of Lion, whose updates are signs."""
  fields = {"optim.name": "lion", "optim.weight_decay": 0.0}
  program, model, metrics = _step(_config(**fields))
  first = jax.device_get(program.init_state().model)
  rate = metrics["learning_rate"]
  assert rate > 0
  change = model.sublayers["shift"].core.now - first.sublayers["shift"].core.now
  np.testing.assert_allclose(abs(change), rate, rtol=1e-3)
  # AdamW's first step is as long, but for what the gradient does not reach.
  change = model.embedding.table - first.embedding.table
  assert (np.abs(change) < 0.5 * rate).any()


@pytest.mark.more
def test_a_pipeline_on_a_mesh_takes_the_plain_step():
  _, plain, metrics = _step(_config())
  for part in (plain.residual.factor, plain.sublayers["shift"].core.now):
    assert np.isfinite(part[...]).all()
  assert np.any(plain.residual.factor[...] != 1)
  _, model, sharded = _step(
    _config(
      **{
        "mesh.stage": 2,
        "mesh.fsdp": 2,
        "pipeline.virtual_stages": 2,
        "pipeline.microbatches": 2,
      }
    )
  )
  np.testing.assert_allclose(sharded["loss"], metrics["loss"], rtol=2e-5)
  for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(plain)):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


def test_compiles_for_a_slice_that_is_not_here():
  pytest.importorskip("libtpu", reason="libtpu is not installed")
  from attnres_jax.common import topology
  from attnres_jax.plan import report

  config = _config(
    **{"mesh.data": 4, "mesh.fsdp": 2, "model.dtype": "bfloat16"}
  )
  plan = report.make_report(config, topology.devices("v5e:2x4"))
  assert plan["fits"] and plan["analytic_flops"] > 0
  assert "fits" in json.dumps(plan)


@pytest.mark.more
def test_sweeps_trains_and_is_plotted(tmp_path):
  source = tiny_sweep.write(
    tmp_path / "sweep.py",
    seeds=(0,),
    **{
      "model.residual.name": "damped",
      "model.num_layers": 2,
      "model.mixers": ("attention", "shift"),
      "train.steps": 12,
      "data.batch_size": 8,
      "optim.peak_lr": 0.01,
    },
  )
  folder = tmp_path / "runs"
  for run in tiny_sweep.prepare(folder, source):
    assert work.run(folder, run.name) == work.Exit.DONE
  names = folder_lib.names(folder)
  rows = [monitor.of_run(folder, name).row for name in names]
  runs = rows_lib.by_scheme(rows, "residual")
  assert list(runs) == ["damped"]
  assert (runs["damped"].loss < np.log(257)).all(), "it learns"
  ax = plots.draw_scaling(
    runs, {"damped": fit_lib.Fit(fit_lib.PowerLaw(2.0, 0.05))}, "residual"
  )
  (label,) = (text.get_text() for text in ax.get_legend().get_texts())
  assert label.startswith("Damped")
  assert {line.get_color() for line in ax.lines} == {"#117733"}


def test_its_mixing_matrix_needs_no_formula():
  model = dataclasses.replace(_config().model, num_layers=2)
  network = train_state.models.build_model(model)
  matrix = analysis.mixing_matrix(network, np.zeros((1, 4), np.int32))
  # Nothing fades at first.
  np.testing.assert_allclose(matrix, np.tri(4))
