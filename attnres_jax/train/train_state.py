# SPDX-License-Identifier: Apache-2.0
"""The state of training, and the pure steps that update it.

`make_program` decides how a network runs on a mesh, whole or as a pipeline.
Training, evaluation and compilation use the `Program` and do not look at the
mesh. Nothing here uses disk, clock or log; see `loop.py`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import optax

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax import optimizer as optimizer_lib
from attnres_jax.common import compiler
from attnres_jax.common import scopes
from attnres_jax.common import sharding
from attnres_jax.models import layer_stacks
from attnres_jax.models import loss as loss_lib
from attnres_jax.models import moe
from attnres_jax.optimizer import groups
from attnres_jax.optimizer import qk_clip
from attnres_jax.pipeline import spmd
from attnres_jax.train import networks

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
    skipped: int32, steps whose update was skipped because it was not finite.
    model: the network, with weights in `model.parameter_dtype`.
    opt_state: of optax.
    average: the mean of the models after the last steps, if
      `train.average_last`; until these begin, the initial model.
  """

  step: jax.Array
  skipped: jax.Array
  model: models.Transformer
  opt_state: Any
  average: models.Transformer | None = None


def make_program(config: config_lib.RunConfig, mesh: Mesh) -> "Program":
  """Decides how a run computes on a mesh. Nothing is compiled.

  Raises:
    ConfigError: the config does not describe a model, an optimiser and a batch
      that fit the mesh.
  """
  sharding.check_divides(config, mesh)
  if config.optim.qk_clip:
    qk_clip.check(config)
  pipelined = mesh.shape[sharding.STAGE] > 1
  make: Any = spmd.make_pipeline if pipelined else networks.Unpipelined
  network = make(config, mesh)
  optimizer_lib.make_schedule(config.optim, config.train.steps)
  shapes = jax.eval_shape(lambda: init(config, config.seed))
  state = sharding.with_sharding(shapes, sharding.state_sharding(shapes, mesh))
  return Program(config, mesh, network, state)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """The steps of a run on a mesh. Each is traced when it is first called.

  Attributes:
    config: of the run.
    mesh: its devices.
    network: how it computes on them.
    abstract_state: shapes, dtypes and shardings of `init_state`.
  """

  config: config_lib.RunConfig
  mesh: Mesh
  network: networks.Network
  abstract_state: TrainState

  @property
  def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """A global batch: `tokens`, `counts` and maybe `segment_ids`."""
    data = self.config.data
    shape = jax.ShapeDtypeStruct(
      (data.batch_size, data.sequence_length + 1),
      jnp.int32,
      sharding=sharding.batch_sharding(self.mesh),
    )
    names = ["tokens", "counts"] + ["segment_ids"] * data.segment_ids
    return dict.fromkeys(names, shape)

  @property
  def parameters(self) -> int:
    """How many numbers the network learns."""
    return sum(a.size for a in jax.tree.leaves(self.abstract_state.model))

  def init_state(self) -> TrainState:
    """A new state, sharded over the mesh."""
    return jax.jit(
      init, static_argnums=(0, 1), out_shardings=self._state_shardings,
      compiler_options=self.init_options,
    )(self.config, self.config.seed)  # fmt: skip

  @property
  def init_options(self) -> dict[str, Any]:
    """Options of the compiler for a program that runs once.

    On CPUs, full optimisation takes three times as long as what it optimises.
    """
    on_cpu = self.mesh.devices.flat[0].platform == "cpu"
    return {"xla_backend_optimization_level": 1} if on_cpu else {}

  @functools.cached_property
  def train_step(self) -> Step:
    """The jitted training step (state, batch) -> (state, metrics).

    Donates the state.

    A batch holds `tokens`, `counts` and maybe `segment_ids`, int32 [B, T+1];
    `loss.counted` says which targets count.

    Metrics, all scalars except the last: loss and z (nats per token, nats
    squared), grad_norm (before clipping), param_norm, learning_rate, tokens
    (that count), finite (loss and gradient are), skipped (so far), grad_norm_L
    [num_layers] (of each transformer block). With experts, the balance of their
    load from `moe.load_metrics`, mean over depth and at the worst sublayer:
    moe_entropy, moe_max_violation, moe_unused. Norms do not include selection
    biases, nor what is frozen. With `optim.qk_clip`, max_logit, the largest of
    attention.

    An update that is not finite is never applied: parameters and optimiser
    state stay unchanged, whatever `train.on_nan` is.
    """
    config = self.config
    rates = (config.optim, config.train.steps)
    learning_rate_at = optimizer_lib.make_schedule(*rates)
    balance_rate_at = optimizer_lib.make_balance_schedule(*rates)
    transform = optimizer_lib.make_optimizer(config.optim)

    def train_step(state: TrainState, batch: Batch):
      examples = loss_lib.Examples.of(batch)
      model, peaks = state.model, {}
      if config.optim.qk_clip:
        model = qk_clip.with_probes(model)
      sums, gradient = self.network.value_and_grad(model, examples)
      if config.optim.qk_clip:
        gradient, peaks = qk_clip.take_peaks(gradient, state.model)
      with scopes.part(scopes.OPTIMISER):
        return update(state, examples, sums, gradient, peaks)

    def update(state, examples, sums, gradient, peaks):
      # The optimiser and its state are float32, whatever weights are kept in.
      params: Any = networks.widened(state.model)
      tokens = jnp.sum(examples.weights)
      count = jnp.maximum(tokens, 1.0)
      gradient = jax.tree.map(lambda g: g / count, gradient)
      trained = optimizer_lib.trained(gradient, config.optim.freeze)
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
      model = jax.tree.map(
        lambda new, old: new.astype(old.dtype), model, state.model
      )
      if peaks:
        clipped = qk_clip.clip(model, peaks, config.optim.qk_clip)
        factors = groups.factors_of(model, config.optim)  # 0 if frozen.
        model = jax.tree.map(
          lambda f, new, old: new if f else old, factors, clipped, model
        )
      old = (state.model, state.opt_state)
      model, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), (model, opt_state), old
      )
      skipped = state.skipped + jnp.where(finite, 0, 1).astype(jnp.int32)
      metrics = dict(
        loss=sums.nll / count,
        z=sums.z / count,
        grad_norm=grad_norm,
        param_norm=optax.tree.norm(
          optimizer_lib.trained(params, config.optim.freeze)
        ),
        learning_rate=learning_rate,
        tokens=tokens,
        finite=finite,
        skipped=skipped,
        grad_norm_L=layer_stacks.block_norms(
          trained.sublayers, config.model.sublayer_kinds
        ),
        **_load_metrics(gradient.sublayers),
      )
      if peaks:
        each = [jnp.max(peak_LN) for peak_LN in peaks.values()]
        metrics["max_logit"] = jnp.max(jnp.stack(each))
      average = state.average
      if average is not None:
        number = state.step + 1 - first_averaged(config.train)
        share = 1 / jnp.maximum(number + 1, 1).astype(jnp.float32)
        share = jnp.where(number < 0, 0.0, share)
        average = jax.tree.map(lambda a, m: a + share * (m - a), average, model)
      new_state = TrainState(
        state.step + 1, skipped, model, opt_state, average=average
      )
      return new_state, metrics

    return jax.jit(
      train_step,
      donate_argnums=0,
      in_shardings=(
        self._state_shardings,
        sharding.batch_sharding(self.mesh),
      ),
      out_shardings=(self._state_shardings, sharding.replicated(self.mesh)),
      compiler_options=compiler.options(self.config, self.mesh) or None,
    )

  @functools.cached_property
  def eval_step(self) -> Step:
    """Jitted (model, batch) -> dict(loss_sum in nats, tokens that count)."""

    def eval_step(model: models.Transformer, batch: Batch) -> Metrics:
      examples = loss_lib.Examples.of(batch)
      sums = self.network.loss_sums(model, examples)
      return dict(loss_sum=sums.nll, tokens=jnp.sum(examples.weights))

    return self._replicated(eval_step)

  @functools.cached_property
  def depth_step(self) -> Step:
    """Jitted (model, batch) -> per-depth series, as in the paper's Fig. 5.

    Root mean squares over one microbatch: state_rms [L] of the running state
    after each sublayer, output_rms [L] of its output, read_rms [L] of its
    input. Schemes with depth attention add depth_entropy [L+1], the mean
    entropy in nats of each read's weights. Not pipelined: every rank computes
    everything.
    """
    rows = self.config.data.batch_size // self.network.microbatches

    def depth_step(model: models.Transformer, batch: Batch) -> Metrics:
      examples = loss_lib.Examples.of(batch)
      inputs, _, _, segment_ids = jax.tree.map(lambda a: a[:rows], examples)
      with sharding.ambient(self.mesh):
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

    return self._replicated(depth_step)

  def _replicated(self, step: Any) -> Step:
    return jax.jit(step, out_shardings=sharding.replicated(self.mesh))

  @property
  def _state_shardings(self) -> Any:
    return jax.tree.map(lambda a: a.sharding, self.abstract_state)


def first_averaged(config: config_lib.TrainConfig) -> int:
  """The first step, counted from 1, whose weights enter the average."""
  return config.steps + 1 - max(1, round(config.average_last * config.steps))


def has_average(config: config_lib.TrainConfig, step: int) -> bool:
  """Whether weights have been averaged when `step` steps are completed."""
  return bool(config.average_last) and step >= first_averaged(config)


def init(config: config_lib.RunConfig, seed: int | jax.Array) -> TrainState:
  """A new state, with the weights of a seed, which may be traced."""
  model: Any = models.build_model(config.model, seed)
  opt_state = optimizer_lib.make_optimizer(config.optim).init(
    networks.widened(model)
  )
  zero = jnp.zeros((), jnp.int32)
  average = None
  if config.train.average_last:
    # A copy, because a step may not donate the same buffer twice.
    average = jax.tree.map(jnp.copy, model)
  return TrainState(zero, zero, model, opt_state, average=average)


def _load_metrics(sublayers: Any) -> Metrics:
  """The balance of the load of experts: mean over depth, and worst sublayer."""
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
