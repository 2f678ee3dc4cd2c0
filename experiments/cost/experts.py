# SPDX-License-Identifier: Apache-2.0
"""Both passes of one sublayer of routed experts, without shared ones.

Here a small network is timed. Compiled, it is a sublayer of a training run, for
one microbatch, with the mesh and the microbatches of the run's plan in
configs/plans.csv.

The least that memory has to move is in bfloat16. Forward, of each of the K
experts of a token: the row of width D is written and read, and so is the
result; gate, up and their product of width F are written and read. Once per
token, the input is read and the sum written:

  (4 K + 2) D + 6 K F

Both passes move 3.3 times as much. If hidden units stay on the core, the second
term goes. What several devices exchange is not in it.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from flax import nnx
import jax

from attnres_jax import config as config_lib
from attnres_jax.common import compiler
from attnres_jax.common import plans
from attnres_jax.common import sharding
from attnres_jax.models import sublayer
from experiments.cost import networks

# Both passes over the forward pass, in numbers that are moved.
_PASSES = 3.3
_ITEMSIZE = 2


def both_passes(module: nnx.Module, x_BTD: jax.Array, dy_BTD: jax.Array) -> Any:
  """The output, and the gradients of weights and input."""
  y_BTD, pull = jax.vjp(lambda module, x: module(x), module, x_BTD)
  return y_BTD, *pull(dy_BTD)


def module_of(model: config_lib.ModelConfig) -> nnx.Module:
  """Routed experts alone."""
  routed = dataclasses.replace(model.moe, num_shared=0)
  model = dataclasses.replace(model, moe=routed)
  return sublayer.Sublayer("moe", model, rngs=nnx.Rngs(params=0)).core


def planned(
  network: networks.Network, devices: Sequence[Any]
) -> config_lib.RunConfig:
  """The config of the network's run, with its plan for these devices.

  Raises:
    ConfigError: the file of plans has none.
  """
  row = plans.find(network.run, devices)
  if row is None:
    config_lib.fail_argument(
      "--networks", network.run.name, "a network with a plan for these chips"
    )
  return plans.apply(network.run, plans.overrides_of(row))


def trace(config: config_lib.RunConfig, devices: Sequence[Any]) -> Any:
  """The traced program of one microbatch."""
  mesh = sharding.make_mesh(config.mesh, devices)
  module = jax.eval_shape(lambda: module_of(config.model))
  places = sharding.state_sharding(module, mesh)
  rows = sharding.batch_sharding(mesh)
  shape = _rows(config), config.data.sequence_length, config.model.width
  x_BTD = jax.ShapeDtypeStruct(shape, config.model.dtype, sharding=rows)

  def train_step(*arguments):  # The name that `plan.schedule` looks for.
    with sharding.ambient(mesh):
      return both_passes(*arguments)

  step = jax.jit(
    train_step,
    out_shardings=(rows, places, rows),
    compiler_options=compiler.options(config, mesh) or None,
  )
  return step.trace(sharding.with_sharding(module, places), x_BTD, x_BTD)


def columns(config: config_lib.RunConfig) -> Mapping[str, Any]:
  """Columns of a row before its program is compiled."""
  mesh, model = config.mesh, config.model
  shards = mesh.data * mesh.fsdp * mesh.expert
  tokens = _rows(config) * config.data.sequence_length // shards
  top_k, hidden = model.moe.top_k, model.moe.expert_width
  rows = (4 * top_k + 2) * model.width
  scale = _PASSES * _ITEMSIZE * tokens / 1e9
  return {
    "batch": _rows(config),
    "mesh": f"{mesh.data} x {mesh.fsdp} x {mesh.expert}",
    "device_tokens": tokens,
    "least_GB": f"{scale * (rows + 6 * top_k * hidden):.4f}",
    "fused_GB": f"{scale * rows:.4f}",
  }


def _rows(config: config_lib.RunConfig) -> int:
  """Rows of a microbatch, on all devices."""
  return config.data.batch_size // config.optim.accumulate_steps
