# SPDX-License-Identifier: Apache-2.0
"""A scheme and a mixer that are not part of the library.

Each is a class in this file and one line that registers it. Everything else
follows: training, FLOPs, meshes, optimisers, pipelines, compilation for TPUs,
sweeps, tables and figures.
"""

import dataclasses
import json

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import analysis
from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax import optimizer
from attnres_jax.common import sharding
from attnres_jax.flops import parameters
from attnres_jax.flops import report as flops_report
from attnres_jax.flops import traffic
from attnres_jax.models import linear
from attnres_jax.models import residuals
from attnres_jax.models import sublayer
from attnres_jax.scaling import fit as fit_lib
from attnres_jax.scaling import plots
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import monitor
from attnres_jax.sweep import rows as rows_lib
from attnres_jax.sweep import worker
from attnres_jax.train import train_state
from tests.sweep import tiny_sweep

WIDTH, LENGTH, LAYERS = 16, 32, 2


class Streams(residuals.Residual):
  """Two streams; each sublayer learns what to read from and add to them.

  h_l = sum_m a_lm X_m,  X_m <- X_m + b_lm f_l(h_l),  h_out = X_1 + X_2
  """

  style = residuals.Style("Two streams", "#117733", "P", ":")

  def __init__(self, config, *, rngs):
    super().__init__(config, rngs=rngs)
    shape = config.num_sublayers, 2
    self.read_weight = nnx.Param(jnp.full(shape, 0.5), axes="LM", decays=False)
    self.write_weight = nnx.Param(jnp.ones(shape), axes="LM", decays=False)

  def init(self, embedding_BTD):
    return jnp.stack([embedding_BTD.astype(jnp.float32)] * 2)

  def open(self, state, start, stop):
    return state, (self.read_weight[start:stop], self.write_weight[start:stop])

  def read(self, carry, slot, norm):
    h_BTD = jnp.einsum("M,MBTD->BTD", slot[0], carry).astype(self.dtype)
    return residuals.base.normed(h_BTD, norm), carry

  def write(self, carry, slot, y_BTD):
    y_BTD = y_BTD.astype(jnp.float32)
    return carry + slot[1][:, None, None, None] * y_BTD[None]

  def close(self, state, carry, stop):
    return carry

  def readout(self, state):
    return jnp.sum(state, axis=0).astype(self.dtype)


class Shift(nnx.Module):
  """Mixes each token with the previous one: W_o (W_a x_t * W_b x_{t-1})."""

  def __init__(self, config, *, rngs):
    matrix = linear.matrices(config.init_std, rngs)
    self.here = matrix("D|NH", config.width, config.num_heads, 4)
    self.before = matrix("D|NH", config.width, config.num_heads, 4)
    self.output = matrix("NH|D", config.num_heads, 4, config.width)
    self.dtype = jnp.dtype(config.dtype)

  def __call__(self, x_BTD, segment_ids_BT=None):
    last_BTD = jnp.pad(x_BTD[:, :-1], ((0, 0), (1, 0), (0, 0)))
    if segment_ids_BT is not None:
      same_BT = segment_ids_BT[:, 1:] == segment_ids_BT[:, :-1]
      same_BT = jnp.pad(same_BT, ((0, 0), (1, 0)))
      last_BTD = last_BTD * same_BT[..., None].astype(last_BTD.dtype)
    here_BTNH = linear.linear(x_BTD, self.here[...])
    mixed_BTNH = here_BTNH * linear.linear(last_BTD, self.before[...])
    return linear.linear(mixed_BTNH, self.output[...], 2)

  def init_cache(self, batch, length):
    del length
    return jnp.zeros((batch, self.here[...].shape[0]), self.dtype)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
  monkeypatch.setitem(residuals.RESIDUALS, "streams", Streams)
  monkeypatch.setitem(sublayer.CORES, "shift", Shift)


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
  return config_lib.load_config("configs/lm.py:residual=streams", fields)


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
  found = flops.make_report(config)
  text = flops_report.to_text(found)
  assert "streams" in text and "shift" in text and "write_weight" not in text
  count = flops.flops_per_token(config.model, LENGTH)
  # A read of two vectors per sublayer; three matrices of two heads in a mixer.
  assert count.residual == 2 * LAYERS * 2 * 2 * WIDTH
  attention = 4 * WIDTH * WIDTH
  shift = 3 * WIDTH * 2 * 4
  assert count.projections == 2 * (attention + shift)
  parts = parameters.of_parts(config.model)
  assert parts["shift"].active == shift
  assert parts["residual"].total == 2 * 2 * LAYERS * 2
  # Both streams and an output in, both streams and the next input out; the
  # first input is only read, and after the last output nothing is.
  sublayers = 2 * LAYERS
  moved = traffic.of_scheme(config.model)
  assert moved.reads == (2 + 3 * sublayers) / sublayers
  assert moved.writes == 3
  assert traffic.of_caches(config.model)["shift"] == traffic.Cache(
    sequence_bytes=WIDTH * 4
  )


def test_letters_say_how_to_train_and_cut_it():
  model = train_state.make_program(
    config := _config(), sharding.make_mesh(config.mesh)
  ).abstract_state.model
  core = optimizer.matrices(model).sublayers["shift"].core
  assert core.here.get_value() and core.output.get_value()
  assert not any(jax.tree.leaves(optimizer.decays(model).residual))
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1, fsdp=2, tensor=2))
  cut = sharding.state_sharding(model, mesh).sublayers["shift"].core
  assert cut.output.get_value().spec == jax.P(
    None, sharding.TENSOR, None, (sharding.FSDP, sharding.STAGE)
  )


def test_a_pipeline_on_a_mesh_takes_the_plain_step():
  _, plain, metrics = _step(_config())
  assert np.isfinite(metrics["loss"])
  _, model, found = _step(
    _config(
      **{
        "mesh.stage": 2,
        "mesh.fsdp": 2,
        "pipeline.virtual_stages": 2,
        "pipeline.microbatches": 2,
      }
    )
  )
  np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=2e-5)
  for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(plain)):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


def test_compiles_for_a_slice_that_is_not_here():
  pytest.importorskip("libtpu", reason="libtpu is not installed")
  from attnres_jax.common import topology
  from attnres_jax.plan import report

  config = _config(
    **{"mesh.data": 4, "mesh.fsdp": 2, "model.dtype": "bfloat16"}
  )
  found = report.make_report(config, topology.devices("v5e:2x4"))
  assert found["fits"] and found["analytic_flops"] > 0
  assert "fits" in json.dumps(found)


def test_sweeps_trains_and_is_plotted(tmp_path):
  source = tiny_sweep.write(
    tmp_path / "sweep.py",
    seeds=(0,),
    **{
      "model.residual.name": "streams",
      "model.num_layers": 2,
      "model.mixers": ("attention", "shift"),
      "train.steps": 12,
      "data.batch_size": 8,
      "optim.peak_lr": 0.01,
    },
  )
  folder = tmp_path / "runs"
  for run in tiny_sweep.prepare(folder, source):
    assert worker.work(folder, run.name) == worker.Exit.DONE
  names = folder_lib.names(folder)
  rows = [monitor.of_run(folder, name).row for name in names]
  runs = rows_lib.by_scheme(rows, "residual")
  assert list(runs) == ["streams"]
  assert (runs["streams"].loss < np.log(257)).all(), "it learns"
  ax = plots.draw_scaling(
    runs, {"streams": fit_lib.Fit(fit_lib.PowerLaw(2.0, 0.05))}, "residual"
  )
  (label,) = (text.get_text() for text in ax.get_legend().get_texts())
  assert label.startswith("Two streams")
  assert {line.get_color() for line in ax.lines} == {"#117733"}


def test_its_mixing_matrix_needs_no_formula():
  model = dataclasses.replace(_config().model, num_layers=2)
  network = train_state.models.build_model(model)
  found = analysis.mixing_matrix(network, np.zeros((1, 4), np.int32))
  # Both streams start as the embedding and add every output once.
  np.testing.assert_allclose(found, np.tri(4))
