# SPDX-License-Identifier: Apache-2.0
"""The training step: golden numbers, and equal ways of computing it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.train import train_state
from tests import compare
from tests import jaxprs
from tests import tiers
from tests import tiny_network

VOCAB = 17


def _config(name="block_attnres", accumulate_steps=1, data=1, **optim):
  return config_lib.RunConfig(
    model=tiny_network.config(name, vocab_size=VOCAB),
    data=config_lib.DataConfig(batch_size=8, sequence_length=6),
    optim=config_lib.OptimConfig(
      peak_lr=0.01,
      warmup_steps=4,
      accumulate_steps=accumulate_steps,
      **optim,
    ),
    train=config_lib.TrainConfig(steps=20),
    mesh=config_lib.MeshConfig(data=data),
  )


@functools.cache
def _program(config):
  """The program of a config, compiled once."""
  return train_state.make_program(config, sharding.make_mesh(config.mesh))


def _batch(seed=0, documents=False):
  rng = np.random.default_rng(seed)
  batch = dict(tokens=rng.integers(0, VOCAB - 1, (8, 7), dtype=np.int32))
  if documents:
    batch["segment_ids"] = np.sort(rng.integers(0, 4, (8, 7)), axis=1)
    batch["segment_ids"] = batch["segment_ids"].astype(np.int32)
  return batch


def _run(config, batches, state=None):
  """(last state, metrics of each step) as numpy."""
  program = _program(config)
  state = program.init_state() if state is None else state
  metrics = []
  for batch in batches:
    batch = sharding.shard_batch(batch, program.mesh)
    state, row = program.train_step(state, batch)
    metrics.append(jax.tree.map(np.asarray, row))
  return jax.tree.map(np.asarray, state), metrics


def _weights(batch):
  """The targets that count: in the document of their context, not padding."""
  if "segment_ids" not in batch:
    return np.ones((8, 6))
  context, target = batch["segment_ids"][:, :-1], batch["segment_ids"][:, 1:]
  return ((context == target) & (target != 0)).astype(float)


def _mean_loss(model, batch):
  """The definition, without tiles: mean nats per counted token; logits."""
  segments = batch.get("segment_ids")
  logits = model(
    batch["tokens"][:, :-1], None if segments is None else segments[:, :-1]
  )
  logp = jax.nn.log_softmax(logits)
  target = batch["tokens"][:, 1:, None]
  nll = -jnp.take_along_axis(logp, target, axis=-1)[..., 0]
  weights = _weights(batch)
  return jnp.sum(weights * nll) / weights.sum(), logits


def _plain(name="block_attnres", **fields):
  """The config of most tests here; unchanged, it is compiled once."""
  config = _config(name, weight_decay=0.0, **fields)
  loss = config_lib.LossConfig(z_loss=0.5, tile_tokens=16)
  return dataclasses.replace(config, loss=loss)


WHOLE = _plain()


GOLDEN = """\
These are the numbers of the first two steps of a small Block AttnRes network.
They hold for every version of JAX that we support. Update them only with a
change that is meant to alter initialisation, network, loss or optimiser, and
say so in the commit; anything else that moves them is a bug."""


def test_golden_steps():
  _, metrics = _run(_config(), [_batch(0), _batch(1)])
  actual = {
    name: [float(row[name]) for row in metrics]
    for name in ("loss", "grad_norm", "param_norm", "learning_rate")
  }
  expected = {
    "loss": [3.0836639, 3.0839686],
    "grad_norm": [2.2047021, 2.0774684],
    "param_norm": [18.9452495, 18.9424648],
    "learning_rate": [0.0025, 0.005],
  }
  for name, values in expected.items():
    np.testing.assert_allclose(
      actual[name], values, rtol=2e-5, err_msg=f"{GOLDEN}\n{name}: {actual}"
    )


@pytest.mark.parametrize(
  "name,documents",
  [
    pytest.param("prenorm", False, marks=pytest.mark.slow),
    ("block_attnres", True),
  ],
)
def test_metrics_are_what_they_say(name, documents):
  """The z-loss affects the gradient but not the loss."""
  config, batch = _plain(name), _batch(documents=documents)
  state = _program(config).init_state()
  weights = _weights(batch)

  def total(model):
    nll, logits = _mean_loss(model, batch)
    z = jax.nn.logsumexp(logits, axis=-1) ** 2
    z = jnp.sum(weights * z) / weights.sum()
    return nll + 0.5 * z, (nll, z)

  (_, (loss, z)), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(
    state.model
  )
  norm = lambda tree: np.sqrt(
    sum(np.sum(np.asarray(a, np.float64) ** 2) for a in jax.tree.leaves(tree))
  )
  by_layer = [
    norm(jax.tree.map(lambda a, i=i: a[i], dict(gradient.sublayers)))
    for i in range(2)
  ]
  parameters = norm(state.model)

  _, (row,) = _run(config, [batch], state)
  np.testing.assert_allclose(row["loss"], loss, rtol=1e-5)
  np.testing.assert_allclose(row["grad_norm"], norm(gradient), rtol=1e-5)
  np.testing.assert_allclose(row["grad_norm_L"], by_layer, rtol=1e-5)
  np.testing.assert_allclose(row["param_norm"], parameters, rtol=1e-5)
  np.testing.assert_allclose(row["z"], z, rtol=1e-5)
  np.testing.assert_allclose(row["learning_rate"], 0.01 / 4, rtol=1e-6)
  assert row["tokens"] == weights.sum() < 49
  assert bool(row["finite"]) and row["skipped"] == 0


@pytest.mark.more
def test_norms_are_of_what_is_trained():
  """So is the norm that is clipped."""
  freeze = ("^embedding/", "^sublayers/")
  config, batch = _config(freeze=freeze), _batch(documents=True)
  state = _program(config).init_state()
  gradient = jax.jit(jax.grad(lambda m: _mean_loss(m, batch)[0]))(state.model)
  norm = lambda tree: float(optax.tree.norm([tree.residual, tree.final_norm]))
  assert norm(gradient) < float(optax.tree.norm(gradient))
  parameters = norm(state.model)
  _, (row,) = _run(config, [batch], state)
  np.testing.assert_allclose(row["grad_norm"], norm(gradient), rtol=1e-4)
  np.testing.assert_allclose(row["param_norm"], parameters, rtol=1e-5)
  np.testing.assert_array_equal(row["grad_norm_L"], 0)


class TestExperts:
  """The load of experts is not a gradient; it moves their biases."""

  config = dataclasses.replace(
    _config("prenorm"),
    optim=config_lib.OptimConfig(
      name="muon", warmup_steps=4, balance_rate=0.25, clip_norm=0.1
    ),
    model=dataclasses.replace(
      _config("prenorm").model,
      moe=config_lib.MoeConfig(
        num_experts=4, top_k=2, expert_width=8, dense_layers=0
      ),
    ),
  )

  def test_step(self):
    batch = _batch(documents=True)
    batch["segment_ids"][0] = (
      0  # A row of padding, which does not count as load.
    )
    state = _program(self.config).init_state()
    gradient = jax.jit(jax.grad(lambda m: _mean_loss(m, batch)[0]))(state.model)
    experts = gradient.sublayers["moe"].core
    load_LE = np.array(experts.selection_bias[...])
    real = (batch["segment_ids"][:, :-1] > 0).sum()
    np.testing.assert_array_equal(load_LE.sum(axis=1), 2 * real)
    experts.selection_bias[...] = jnp.zeros((2, 4))
    squares = [np.sum(np.square(g)) for g in jax.tree.leaves(gradient)]

    after, (row,) = _run(self.config, [batch], state)
    np.testing.assert_allclose(row["grad_norm"] ** 2, sum(squares), rtol=1e-4)
    assert (row["grad_norm_L"] ** 2).sum() <= sum(squares)
    # By definition: entropy over its maximum, max over mean - 1, no tokens.
    p_LE = load_LE / load_LE.sum(axis=1, keepdims=True)
    terms_LE = np.where(p_LE > 0, -p_LE * np.log(np.maximum(p_LE, 1e-9)), 0)
    entropy_L = terms_LE.sum(axis=1) / np.log(4)
    violation_L = p_LE.max(axis=1) * 4 - 1
    assert violation_L.std() > 0
    expected = dict(
      moe_entropy=entropy_L.mean(),
      moe_entropy_worst=entropy_L.min(),
      moe_max_violation=violation_L.mean(),
      moe_max_violation_worst=violation_L.max(),
      moe_unused=(load_LE == 0).mean(),
    )
    for name, value in expected.items():
      np.testing.assert_allclose(row[name], value, rtol=1e-5, err_msg=name)
    sign_LE = np.sign(load_LE.mean(axis=1, keepdims=True) - load_LE)
    change_LE = 0.25 * (sign_LE - sign_LE.mean(axis=1, keepdims=True))
    bias_LE = after.model.sublayers["moe"].core.selection_bias[...]
    np.testing.assert_allclose(bias_LE, change_LE, atol=1e-6)

  def test_step_that_is_not_finite_leaves_biases(self):
    state = _program(self.config).init_state()
    bias = state.model.sublayers["moe"].core.selection_bias
    bias[...] = jnp.arange(8.0).reshape(2, 4)
    table = state.model.embedding.table
    table[...] = table[...].at[VOCAB - 1].set(jnp.inf)
    bad = _batch(documents=True)
    bad["tokens"][2, 1] = VOCAB - 1
    state, (row,) = _run(self.config, [bad], state)
    assert not bool(row["finite"]) and state.skipped == 1
    bias_LE = state.model.sublayers["moe"].core.selection_bias[...]
    np.testing.assert_array_equal(bias_LE, np.arange(8.0).reshape(2, 4))


@tiers.parametrize(
  "parts,devices",
  [(4, 1), (2, 4), pytest.param(1, 8, marks=pytest.mark.slow)],
)
def test_microbatches_and_devices_are_one_large_batch(parts, devices):
  # All rows have different numbers of counted tokens, so that a mean of means
  # would differ.
  batches = [_batch(i, documents=True) for i in range(2)]
  assert len({*_weights(batches[0]).sum(axis=1)}) > 1
  config = _plain(accumulate_steps=parts, data=devices)
  assert _program(config).mesh.size == devices
  model, rows = _run(config, batches)
  expected, whole_rows = _run(WHOLE, batches)
  compare.trees(rows, whole_rows, 1e-5)
  compare.trees(model, expected, 2e-5)


@tiers.parametrize("remat", ["none", "full"], first=["full"])
def test_the_gradient_of_each_layer_is_added_separately(remat):
  """All of them are never stacked, while one microbatch follows another."""
  config = _plain(accumulate_steps=2)
  model = dataclasses.replace(config.model, remat=remat)
  config = dataclasses.replace(config, model=model)
  program = _program(config)
  step = program.train_step.trace(program.abstract_state, program.batch_shapes)
  loops = [
    equation.outvars[: equation.params["num_carry"]]
    for equation in jaxprs.equations(step.jaxpr)
    if equation.primitive.name == "scan" and equation.params["length"] == 2
  ]
  carry = [v.aval.shape for v in max(loops, key=len)]
  matrices = [shape for shape in carry if len(shape) > 2]
  layers = len(model.sublayer_kinds) // 2
  assert len(matrices) > 3 * layers > 3
  assert {shape[0] for shape in matrices} == {1}
  batches = [_batch(i, documents=True) for i in range(2)]
  trained, rows = _run(config, batches)
  expected, whole_rows = _run(WHOLE, batches)
  compare.trees(rows, whole_rows, 1e-5)
  compare.trees(trained, expected, 2e-5)


def test_step_that_is_not_finite_changes_nothing():
  config, program = WHOLE, _program(WHOLE)
  state = program.init_state()
  # The embedding of the last token is infinite; batches without it are fine.
  table = state.model.embedding.table
  table[...] = table[...].at[VOCAB - 1].set(jnp.inf)
  good, bad = _batch(documents=True), _batch(documents=True)
  bad["tokens"][2, 1] = VOCAB - 1

  state, (first,) = _run(config, [good], state)
  assert bool(first["finite"]) and state.skipped == 0
  state = jax.device_put(state, sharding.replicated(program.mesh))
  before = jax.tree.map(np.array, state)
  state, (row,) = _run(config, [bad], state)
  assert not bool(row["finite"]) and row["skipped"] == 1
  assert not np.isfinite(row["loss"])
  assert (state.step, state.skipped) == (2, 1)
  for part in ("model", "opt_state"):
    both = (getattr(s, part) for s in (state, before))
    jax.tree.map(np.testing.assert_array_equal, *both)

  state = jax.device_put(state, sharding.replicated(program.mesh))
  after, (row,) = _run(config, [good], state)
  assert bool(row["finite"]) and row["skipped"] == 1
  assert row["loss"] < first["loss"]
  assert (after.step, after.skipped) == (3, 1)


def test_batch_without_targets_is_no_division_by_zero():
  batch = _batch()
  batch["segment_ids"] = np.zeros_like(batch["tokens"])
  state, (row,) = _run(WHOLE, [batch])
  assert row["tokens"] == 0 and row["loss"] == 0 and bool(row["finite"])
  assert all(np.isfinite(a).all() for a in jax.tree.leaves(state))


@tiers.parametrize("parts", [1, 4], first=[4])
def test_eval_step_sums_without_the_z_loss(parts):
  """One microbatch after another, as in a step."""
  program = _program(_plain(accumulate_steps=parts))
  model, batch = program.init_state().model, _batch(documents=True)
  made = jaxprs.arrays(jax.make_jaxpr(program.eval_step)(model, batch))
  width = program.config.model.width
  rows = {a.shape[0] for a in made if a.shape[1:] == (6, width)}
  assert 8 // parts in rows and (8 in rows) == (parts == 1)
  sums = program.eval_step(model, batch)
  assert set(sums) == {"loss_sum", "tokens"}
  assert sums["tokens"] == _weights(batch).sum()
  expected = jax.jit(_mean_loss)(model, batch)[0] * _weights(batch).sum()
  np.testing.assert_allclose(sums["loss_sum"], expected, rtol=1e-5)


@tiers.parametrize(
  "name",
  [
    "prenorm",
    pytest.param("full_attnres", marks=pytest.mark.slow),
    "block_attnres",
  ],
  first=["block_attnres"],
)
def test_depth_series(name):
  config = _config(name, accumulate_steps=2)
  program = _program(config)
  model = program.init_state().model
  if name != "prenorm":
    query = model.residual.queries.query
    query[...] = jax.random.normal(jax.random.key(0), query.shape)
  batch = _batch(documents=True)
  series = program.depth_step(model, batch)

  # One microbatch of four rows.
  rows = batch["tokens"][:4, :-1], batch["segment_ids"][:4, :-1]
  trace = jax.jit(lambda model: model.trace(*rows))(model)
  values = [np.asarray(v, np.float64) for v in trace.values]
  reads = [np.asarray(h, np.float64) for h in trace.reads]
  rms = lambda arrays: [np.sqrt(np.mean(a**2)) for a in arrays]
  np.testing.assert_allclose(series["output_rms"], rms(values[1:]), rtol=1e-5)
  np.testing.assert_allclose(series["read_rms"], rms(reads[:-1]), rtol=1e-5)
  states = reads[1:]
  if name == "block_attnres":  # partial sums of two blocks of two sublayers
    states = [values[1], values[1] + values[2]]
    states += [values[3], values[3] + values[4]]
  np.testing.assert_allclose(series["state_rms"], rms(states), rtol=1e-5)
  if name == "prenorm":
    assert "depth_entropy" not in series
    return
  weights = jax.jit(model.residual.depth_weights)(trace.values)
  entropy = []
  for p in map(np.float64, weights):
    entropy.append(np.mean(-np.sum(p * np.log(p), axis=0)))
  assert entropy[0] == 0 and entropy[-1] > 0.1
  np.testing.assert_allclose(
    series["depth_entropy"], entropy, rtol=1e-4, atol=1e-6
  )


def test_abstract_state_is_the_state():
  program = _program(_plain(accumulate_steps=2, data=4))
  abstract, state = program.abstract_state, program.init_state()
  assert jax.tree.structure(abstract) == jax.tree.structure(state)
  for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(state)):
    assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
  assert state.step == 0 and state.step.dtype == jnp.int32


@pytest.mark.more
def test_the_state_is_donated():
  program = _program(WHOLE)
  state = program.init_state()
  leaf = jax.tree.leaves(state.model)[0]
  batch = _batch(documents=True)
  program.train_step(state, sharding.shard_batch(batch, program.mesh))
  assert leaf.is_deleted()
