# SPDX-License-Identifier: Apache-2.0
"""What training carries from step to step, and the pure steps on it.

Nothing here talks to disk, clock or log: that is `train.py`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import optax

from attnres_jax import config as config_lib
from attnres_jax import loss as loss_lib
from attnres_jax import models
from attnres_jax import optimizer as optimizer_lib
from attnres_jax import sharding
from attnres_jax.models import moe
from attnres_jax.models import stack
from attnres_jax.pipeline import spmd

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
# A jitted function: it can be called, or lowered and compiled.
Step = jax.stages.Wrapped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything a step reads and writes.

  Attributes:
    step: int32, optimiser steps taken or skipped so far.
    skipped: int32, steps whose update was left out since it was not finite.
    model: the network, float32 master weights.
    opt_state: of optax.
  """

  step: jax.Array
  skipped: jax.Array
  model: models.Transformer
  opt_state: Any


def init_state(config: config_lib.RunConfig, mesh: Mesh) -> TrainState:
  """A fresh state, laid out over the mesh.

  Raises:
    ConfigError: the config does not describe a model, an optimiser and a batch
      that fit the mesh. Nothing is compiled before.
  """
  shardings = jax.tree.map(lambda a: a.sharding, abstract_state(config, mesh))
  return jax.jit(_init, static_argnums=0, out_shardings=shardings)(config)


def abstract_state(config: config_lib.RunConfig, mesh: Mesh) -> TrainState:
  """Shapes, dtypes and shardings of `init_state`, without any computation."""
  _check(config, mesh)
  shapes = jax.eval_shape(lambda: _init(config))
  return sharding.with_sharding(shapes, sharding.state_sharding(shapes, mesh))


def make_train_step(config: config_lib.RunConfig, mesh: Mesh) -> Step:
  """The jitted training step (state, batch) -> (state, metrics).

  Donates the state.

  A batch holds `tokens` int32 [B, T+1] and maybe `segment_ids` int32 [B, T+1]
  (0 for padding). Targets in another segment than their context, or in
  padding, do not count.

  Metrics, all scalars but the last: loss and z (nats per token, nats squared),
  grad_norm (before clipping), param_norm, learning_rate, tokens (that count),
  finite (loss and gradient are), skipped (so far), grad_norm_L [num_layers]
  (of each transformer block). With experts, how even their load is, as
  `moe.load_metrics` says, mean over depth and at the worst sublayer:
  moe_entropy, moe_max_violation, moe_unused. Selection biases are no part of
  the norms.

  An update that is not finite is never applied: parameters and optimiser state
  stay what they were, whatever `train.on_nan` makes the loop do about it.
  """
  state_shardings = jax.tree.map(
    lambda a: a.sharding, abstract_state(config, mesh)
  )
  rates = (config.optim, config.train.steps)
  learning_rate_at = optimizer_lib.make_schedule(*rates)
  balance_rate_at = optimizer_lib.make_balance_schedule(*rates)
  transform = optimizer_lib.make_optimizer(config.optim)

  def train_step(state: TrainState, batch: Batch):
    params: Any = state.model
    sums, tokens, gradient = _accumulate(config, mesh, params, batch)
    count = jnp.maximum(tokens, 1.0)
    gradient = jax.tree.map(lambda g: g / count, gradient)
    trained = optimizer_lib.trained(gradient)
    grad_norm = optax.tree.norm(trained)
    learning_rate = jnp.asarray(learning_rate_at(state.step), jnp.float32)
    loss = sums.total / count
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

    updates, opt_state = transform.update(
      gradient,
      state.opt_state,
      params,
      learning_rate=learning_rate,
      balance_rate=balance_rate_at(state.step),
    )
    model = optax.apply_updates(params, updates)
    old = (state.model, state.opt_state)
    model, opt_state = jax.tree.map(
      lambda new, old: jnp.where(finite, new, old), (model, opt_state), old
    )
    skipped = state.skipped + jnp.where(finite, 0, 1).astype(jnp.int32)
    metrics = dict(
      loss=sums.nll / count,
      z=sums.z / count,
      grad_norm=grad_norm,
      param_norm=optax.tree.norm(optimizer_lib.trained(params)),
      learning_rate=learning_rate,
      tokens=tokens,
      finite=finite,
      skipped=skipped,
      grad_norm_L=stack.layer_norms(
        trained.sublayers, config.model.sublayer_kinds
      ),
      **_load_metrics(gradient.sublayers),
    )
    new_state = TrainState(
      step=state.step + 1, skipped=skipped, model=model, opt_state=opt_state
    )
    return new_state, metrics

  return jax.jit(
    train_step,
    donate_argnums=0,
    in_shardings=(state_shardings, sharding.batch_sharding(mesh)),
    out_shardings=(state_shardings, sharding.replicated(mesh)),
  )


def make_eval_step(config: config_lib.RunConfig, mesh: Mesh) -> Step:
  """Jitted (model, batch) -> dict(loss_sum in nats, tokens that count)."""

  def eval_step(model: models.Transformer, batch: Batch) -> Metrics:
    sums, tokens = _loss_sums(config, mesh, model, batch)
    return dict(loss_sum=sums.nll, tokens=tokens)

  return jax.jit(eval_step, out_shardings=sharding.replicated(mesh))


def make_depth_step(config: config_lib.RunConfig, mesh: Mesh) -> Step:
  """Jitted (model, batch) -> per-depth series, as in the paper's Fig. 5.

  Root mean squares over one microbatch: state_rms [L] of the running state
  after each sublayer, output_rms [L] of what it put out, read_rms [L] of what
  it read. Schemes with depth attention add depth_entropy [L+1], the mean
  entropy in nats of each read's weights.
  """
  rows = config.data.batch_size // config.optim.accumulate_steps
  if _pipelined(mesh):
    rows //= spmd.num_microbatches(config, mesh)

  def depth_step(model: models.Transformer, batch: Batch) -> Metrics:
    inputs, _, _, segment_ids = _split(batch)
    inputs = inputs[:rows]
    segment_ids = None if segment_ids is None else segment_ids[:rows]
    with sharding.ambient(mesh):
      trace = model.trace(inputs, segment_ids)
    series = dict(
      state_rms=_rms(model.residual.running_state(trace)),
      output_rms=_rms(trace.values[1:]),
      read_rms=_rms(trace.reads[:-1]),
    )
    weights = model.residual.depth_weights(trace.values)
    if weights is not None:
      series["depth_entropy"] = jnp.stack([_mean_entropy(w) for w in weights])
    return series

  return jax.jit(depth_step, out_shardings=sharding.replicated(mesh))


def _check(config: config_lib.RunConfig, mesh: Mesh) -> None:
  sharding.check_divides(config, mesh)
  if _pipelined(mesh):
    spmd.make_plan(config, mesh)
  optimizer_lib.make_schedule(config.optim, config.train.steps)


def _pipelined(mesh: Mesh) -> bool:
  return mesh.shape[sharding.STAGE] > 1


def _init(config: config_lib.RunConfig) -> TrainState:
  model: Any = models.build_model(config.model, config.seed)
  opt_state = optimizer_lib.make_optimizer(config.optim).init(model)
  zero = jnp.zeros((), jnp.int32)
  return TrainState(step=zero, skipped=zero, model=model, opt_state=opt_state)


def _split(batch: Batch):
  """(inputs, targets, weights, segment ids of the inputs), each [B, T]."""
  tokens, segment_ids = batch["tokens"], batch.get("segment_ids")
  inputs, targets = tokens[:, :-1], tokens[:, 1:]
  if segment_ids is None:
    return inputs, targets, jnp.ones(targets.shape, jnp.float32), None
  context, target = segment_ids[:, :-1], segment_ids[:, 1:]
  weights = ((context == target) & (target > 0)).astype(jnp.float32)
  return inputs, targets, weights, context


def _loss_sums(config, mesh, model, batch):
  inputs, targets, weights, segment_ids = _split(batch)
  if _pipelined(mesh):
    rows = spmd.Microbatch(inputs, targets, weights, segment_ids)
    return spmd.evaluate(config, mesh, model, rows), jnp.sum(weights)
  with sharding.ambient(mesh):
    sums = loss_lib.cross_entropy(
      model.hidden(inputs, segment_ids),
      model.embedding.head_DV(),
      targets,
      weights,
      soft_cap=config.model.logit_soft_cap,
      z_loss=config.loss.z_loss,
      tile_tokens=config.loss.tile_tokens,
    )
  return sums, jnp.sum(weights)


def _accumulate(config, mesh, model, batch):
  """Loss sums, counted tokens and summed gradient over all microbatches."""
  if _pipelined(mesh):
    rows = spmd.Microbatch(*_split(batch))
    sums, gradient = spmd.value_and_grad(config, mesh, model, rows)
    return sums, jnp.sum(rows.weights), gradient

  def value_and_grad(microbatch):
    def total(model):
      sums, tokens = _loss_sums(config, mesh, model, microbatch)
      return sums.total, (sums, tokens)

    gradient, (sums, tokens) = jax.grad(total, has_aux=True)(model)
    return sums, tokens, gradient

  parts = config.optim.accumulate_steps
  if parts == 1:
    return value_and_grad(batch)

  def microbatches(a):
    # Every device keeps rows of its own in every microbatch.
    return jnp.swapaxes(a.reshape(-1, parts, *a.shape[1:]), 0, 1)

  def add(total, microbatch):
    return jax.tree.map(jnp.add, total, value_and_grad(microbatch)), None

  batches = jax.tree.map(microbatches, batch)
  shapes = jax.eval_shape(value_and_grad, jax.tree.map(lambda a: a[0], batches))
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  total, _ = jax.lax.scan(add, zeros, batches)
  return total


def _load_metrics(sublayers: Any) -> Metrics:
  """How even the load of experts is: mean over depth, and the worst place."""
  if "moe" not in sublayers:
    return {}
  load = moe.load_metrics(sublayers["moe"].core.selection_bias[...])
  return dict(
    moe_entropy=jnp.mean(load["entropy"]),
    moe_entropy_worst=jnp.min(load["entropy"]),
    moe_max_violation=jnp.mean(load["max_violation"]),
    moe_max_violation_worst=jnp.max(load["max_violation"]),
    moe_unused=jnp.mean(load["unused"]),
  )


def _rms(arrays: tuple[jax.Array, ...]) -> jax.Array:
  return jnp.stack(
    [jnp.sqrt(jnp.mean(jnp.square(a.astype(jnp.float32)))) for a in arrays]
  )


def _mean_entropy(weights_MBT: jax.Array) -> jax.Array:
  return jnp.mean(jnp.sum(jax.scipy.special.entr(weights_MBT), axis=0))
