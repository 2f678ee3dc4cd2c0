# SPDX-License-Identifier: Apache-2.0
"""Ways to run a config on a slice, ranked by arithmetic; nothing is compiled.

A plan has a mesh (data, fsdp, expert), microbatches and `model.remat`. Meshes
that cannot fit are dropped, and the rest is ranked by a rough estimate of a
step's time: the largest of compute, memory and links. `mesh.tensor` stays as
the config has it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax.common import chips
from attnres_jax.common import plans as plans_lib
from attnres_jax.common import sharding
from attnres_jax.common import topology
from attnres_jax.models import linear
from attnres_jax.models import loss
from attnres_jax.models import sublayer
from attnres_jax.plan import report as report_lib
from attnres_jax.train import train_state

_GIB = 2**30
_TILE = 128  # columns of a tile in a TPU's memory
# The rough estimate only ranks plans. Reads and writes of a vector of the width
# per token and sublayer, in all passes without checkpointing, as found in the
# compiled steps of 194M and 436M; of experts, for each that a token has. Other
# kinds are as attention.
_VECTORS = {"kda": 280, "mla": 125, "moe": 51}
_OTHER_VECTORS = 125
_RESIDUAL_VECTORS = 29
# Bytes per logit, in all passes.
_LOGIT_BYTES = 20
# The same for each token that a device gathers along mesh.expert, in a sublayer
# of experts: from compiled steps of 194M (expert=4 and 8) and 436M (expert=16).
_GATHERED_VECTORS = 14
# An optimiser step moves its state and parameters about this many times (Muon
# in those of 194M; AdamW, which stands for any other, reads four arrays and
# writes three, of three).
_OPTIMISER, _OTHER_OPTIMISER = {"muon": 13.0}, 7 / 3
# Without checkpointing, autodiff keeps about this many times the results of the
# products (in those of 194M); more where layers are a scan.
_UNCHECKPOINTED, _SCANNED = 1.7, 3.0
# A sublayer of experts holds this many bytes per number of each token that a
# device gathers: tokens, gradients, rows of each, sums in float32.
_GATHERED_BYTES = 22
# Logits of a tile take at most this share of the memory.
_LOGITS = 0.1
# Above this share of the memory, a plan will probably not fit, so each percent
# more makes its rough time 3 % longer.
_SAFE, _RISK = 0.75, 3.0
# A width that fsdp does not cut into whole tiles makes a rough time longer by
# this factor. In a step of 13 layers of 1088 columns (configs/arch_sweep.py) on
# v5p, 1 x 4 x 4 took 0.99 times as long as 2 x 1 x 8, by the schedule, and 0.93
# by the rough estimate. Where memory is short, such cuts are worth much more.
_RAGGED = 1.085
# How often the forward pass runs, by what is kept of it.
_PASSES = {"none": 1.0, "dots": 1.1, "attention": 1.9, "full": 2.0}
# The same for what it moves: products are a third of that. What a scan keeps is
# copied into stacks and out of them: an eighth of all bytes in a step of 194M.
# Twice the forward pass is a guess on the safe side of that.
_MOVING_PASSES = _PASSES | {"dots": 1.4}
_SCANNING_PASSES = _PASSES | {"none": 2.0, "dots": 2.0}


@dataclasses.dataclass(frozen=True)
class Plan:
  """One way to run a config.

  Attributes:
    overrides: of the config's fields.
    kept_bytes: per device: state, gradients, activations that are kept, and
      what a sublayer of experts holds. Other sublayers' own work comes on top.
    rough_seconds: by which plans are ranked before compiling; longer for plans
      that leave little room.
  """

  overrides: Mapping[str, Any]
  kept_bytes: float
  rough_seconds: float

  def apply(self, config: config_lib.RunConfig) -> config_lib.RunConfig:
    """The config with these fields."""
    return plans_lib.apply(config, self.overrides)


def plans(
  config: config_lib.RunConfig,
  devices: Sequence[Any],
) -> tuple[list[Plan], dict[str, int]]:
  """All plans that fit by arithmetic, by rough time; and why others do not.

  Args:
    config: of the run.
    devices: of `topology.devices`.

  Raises:
    ConfigError: the config is a pipeline or has no vocabulary size, or
      `mesh.tensor` does not divide the devices.
  """
  if config.mesh.stage > 1:
    config_lib.fail(
      "mesh.stage",
      config.mesh.stage,
      "1: of a pipeline, compile the plan that you choose"
      " (python -m attnres_jax.plan)",
    )
  if not config.model.vocab_size:
    config_lib.fail("model.vocab_size", 0, "the tokenizer's vocabulary size")
  optim = dataclasses.replace(config.optim, accumulate_steps=1)
  config = dataclasses.replace(config, optim=optim)
  chip = topology.chip(devices[0])
  network = _Network.of(config, devices)
  saved = _saved_bytes(config.model)
  found, dropped = [], dict[str, int]()

  def drop(reason: str) -> None:
    dropped[reason] = dropped.get(reason, 0) + 1

  for mesh_fields in _meshes(config, len(devices)):
    meshed = dataclasses.replace(config, mesh=mesh_fields)
    try:
      cost = _Cost.of(meshed, devices, network)
    except config_lib.ConfigError as error:
      drop(str(error).partition(",")[0])
      continue
    mesh_overrides = {
      f"mesh.{axis}": getattr(mesh_fields, axis)
      for axis in (sharding.DATA, sharding.FSDP, sharding.EXPERT)
    }
    ragged = mesh_fields.fsdp > 1 and config.model.width % (
      mesh_fields.fsdp * _TILE
    )
    for fields, kept, seconds in _shapes(meshed, cost, saved):
      if kept > chip.hbm_bytes:
        drop(f"more than {chip.hbm_bytes / _GIB:.0f} GiB by arithmetic")
        continue
      seconds *= 1 + _RISK * max(0.0, kept / chip.hbm_bytes - _SAFE)
      seconds *= _RAGGED if ragged else 1
      overrides = mesh_overrides | fields | _tiles(config, chip)
      found.append(Plan(overrides, kept, seconds))
  # Of plans that look equal, the one with the largest microbatches.
  found.sort(
    key=lambda plan: (
      plan.rough_seconds, plan.overrides["optim.accumulate_steps"]
    )
  )  # fmt: skip
  return found, dropped


def _tiles(config: config_lib.RunConfig, chip: chips.Chip) -> dict[str, int]:
  """Tiles of the loss, if the default ones would not suit the memory.

  Every tile adds a gradient of the head, so they should be as large as fits.
  """
  vocab_size = config.model.vocab_size
  small = loss.TILE_BYTES // (4 * vocab_size) > loss.TILE_TOKENS
  if config.loss.tile_tokens or small:
    return {}
  # In float32, and in the dtype of products.
  itemsize = 4 + jnp.dtype(config.model.dtype).itemsize
  fits = _LOGITS * chip.hbm_bytes / (itemsize * vocab_size)
  tile = 2 ** int(math.log2(fits))
  return {} if tile == loss.TILE_TOKENS else {"loss.tile_tokens": tile}


# One way to run a config on a mesh: fields, kept bytes, rough seconds.
_Shape = tuple[dict[str, Any], float, float]


def _shapes(
  config: config_lib.RunConfig, cost: "_Cost", saved: Mapping[str, float]
) -> Iterator[_Shape]:
  """Every number of microbatches that divides a device's rows, every remat."""
  mesh = config.mesh
  rows = config.data.batch_size // (mesh.data * mesh.fsdp * mesh.expert)
  for accumulate in _divisors(rows):
    for remat in _PASSES:
      yield (
        {"optim.accumulate_steps": accumulate, "model.remat": remat},
        cost.kept_bytes(accumulate, saved[remat]),
        cost.seconds(accumulate, remat),
      )


@dataclasses.dataclass(frozen=True)
class _Network:
  """What is the same on all meshes.

  Attributes:
    state: `train_state.TrainState`, abstract.
    kept: bytes per token that are kept with remat=full.
    forward: FLOPs of a token.
  """

  state: Any
  kept: float
  forward: float

  @classmethod
  def of(
    cls, config: config_lib.RunConfig, devices: Sequence[Any]
  ) -> "_Network":
    one = dataclasses.replace(
      config,
      model=dataclasses.replace(config.model, remat="full"),
      optim=dataclasses.replace(config.optim, accumulate_steps=1),
      data=dataclasses.replace(config.data, batch_size=1),
      mesh=config_lib.MeshConfig(data=1),
    )
    mesh = sharding.make_mesh(one.mesh, devices[:1])
    program = train_state.make_program(one, mesh)
    kept = program.network.kept_bytes(program.abstract_state.model)
    length = config.data.sequence_length
    per_token = flops.flops_per_token(config.model, length)
    return cls(
      program.abstract_state,
      sum(kept.values()) / length,
      per_token.forward,
    )


@dataclasses.dataclass(frozen=True)
class _Cost:
  """What ranks the plans of one mesh; bytes per device.

  Attributes:
    config: with the mesh.
    chip: of the slice.
    forward: FLOPs of a token.
    state: of parameters and optimiser, at rest.
    gradient: the float32 gradient, as parameters are at rest.
    gathered: parameters that a device computes with, in the dtype of products.
    tokens: of a device and step.
    kept: what is kept per token with remat=full.
  """

  config: config_lib.RunConfig
  chip: chips.Chip
  forward: float
  state: float
  gradient: float
  gathered: float
  tokens: float
  kept: float

  @classmethod
  def of(
    cls,
    config: config_lib.RunConfig,
    devices: Sequence[Any],
    network: "_Network",
  ) -> "_Cost":
    mesh: Mesh = sharding.make_mesh(config.mesh, devices)
    sharding.check_divides(config, mesh)
    shardings = sharding.state_sharding(network.state, mesh)
    state = sharding.with_sharding(network.state, shardings)
    experts = mesh.shape[sharding.EXPERT]
    used = _bytes_with(state.model, lambda p: experts if "E|" in p.axes else 1)
    model, data = config.model, config.data
    shards = sharding.num_row_shards(mesh) * mesh.shape[sharding.TENSOR]
    return cls(
      config,
      topology.chip(devices[0]),
      forward=network.forward,
      state=sharding.bytes_per_device((state.model, state.opt_state)),
      gradient=sharding.bytes_per_device(state.model),
      gathered=used / 4 * jnp.dtype(model.dtype).itemsize,
      tokens=data.batch_size * data.sequence_length / shards,
      kept=network.kept,
    )

  def kept_bytes(self, accumulate: int, saved: float) -> float:
    """What a device holds at the end of the forward or of the backward pass.

    A microbatch's gradient is added to the sum once it is complete.

    Args:
      accumulate: microbatches.
      saved: bytes per token that are kept beyond the running states.
    """
    model, experts = self.config.model, self.config.mesh.expert
    tokens = self.tokens / accumulate
    kept = tokens * (self.kept + saved)
    if accumulate > 1:
      kept = max(kept, self.gradient)
    if experts > 1 and "moe" in model.sublayer_kinds:
      kept += tokens * _GATHERED_BYTES * experts * model.width
    return self.state + self.gradient + kept

  def seconds(self, accumulate: int, remat: str) -> float:
    """The largest of compute, memory and links, roughly."""
    model, mesh, chip = self.config.model, self.config.mesh, self.chip
    passes = _PASSES[remat]
    work = (passes + 2) * self.forward * self.tokens
    # Weights are read in every pass, and float32 gradients are added.
    weights = accumulate * self.gathered * (passes + 2 + 4)
    moving = _SCANNING_PASSES if model.scan_layers else _MOVING_PASSES
    activations = self._moved_bytes() * (moving[remat] + 2) / 3
    activations += _LOGIT_BYTES * model.vocab_size
    cut = 1 - 1 / mesh.fsdp
    sent = accumulate * self.gathered * cut * (passes + 1 + 2)
    sent += 2 * self.gradient * (1 - 1 / mesh.data)
    layers = model.sublayer_kinds.count("moe")
    experts = layers * (mesh.expert - 1)
    sent += self.tokens * model.width * 2 * experts * 2 * (passes + 1)
    optimiser = self.state * _OPTIMISER.get(
      self.config.optim.name, _OTHER_OPTIMISER
    )
    if mesh.expert > 1:
      activations += _GATHERED_VECTORS * layers * mesh.expert * model.width * 2
    return max(
      work / chip.peak_flops_per_second,
      (weights + activations * self.tokens + optimiser)
      / chip.hbm_bytes_per_second,
      sent / chip.link_bytes_per_second,
    )

  def _moved_bytes(self) -> float:
    """What all sublayers move per token, without gathering and logits."""
    model = self.config.model
    vectors = model.num_sublayers * _RESIDUAL_VECTORS
    for kind in model.sublayer_kinds:
      each = model.moe.top_k if kind == "moe" else 1
      vectors += each * _VECTORS.get(kind, _OTHER_VECTORS)
    return vectors * model.width * jnp.dtype(model.dtype).itemsize


def _meshes(
  config: config_lib.RunConfig, devices: int
) -> Iterator[config_lib.MeshConfig]:
  """Meshes over all devices; fsdp leaves at least a tile, or is 1.

  The compiler gathers smaller pieces by all-reduces.
  """
  tensor = max(1, config.mesh.tensor)
  model = config.model
  if devices % tensor:
    config_lib.fail("mesh.tensor", tensor, f"a divisor of {devices} devices")
  shards = devices // tensor
  for expert in _divisors(math.gcd(shards, model.moe.num_experts or 1)):
    for fsdp in _divisors(shards // expert):
      piece, rest = divmod(model.width, fsdp)
      if fsdp == 1 or (rest == 0 and (piece >= _TILE or model.width < _TILE)):
        yield dataclasses.replace(
          config.mesh,
          data=shards // expert // fsdp,
          fsdp=fsdp,
          expert=expert,
          tensor=tensor,
        )


def _saved_bytes(model: config_lib.ModelConfig) -> dict[str, float]:
  """Bytes per token that each remat keeps beyond the running states.

  The results of products, where they are kept. The outputs of attention are
  left out.
  """
  length = 256
  x_BTD = jax.ShapeDtypeStruct((1, length, model.width), model.dtype)
  each = {}
  for kind in dict.fromkeys(model.sublayer_kinds):
    core = sublayer.abstract_core(kind, model)
    with linear.counting():
      traced = jax.make_jaxpr(lambda core, x_BTD: core(x_BTD))(core, x_BTD)
    each[kind] = sum(
      math.prod(v.aval.shape) * v.aval.dtype.itemsize
      for equation in report_lib.equations(traced.jaxpr)
      if equation.params.get("name") == linear.PRODUCT
      for v in equation.outvars
    )
  products = sum(each[kind] for kind in model.sublayer_kinds) / length
  unchecked = _SCANNED if model.scan_layers else _UNCHECKPOINTED
  kept = {"none": unchecked, "dots": 1.0}
  return {remat: kept.get(remat, 0.0) * products for remat in _PASSES}


def _bytes_with(model: Any, shards: Callable[[Any], float]) -> float:
  """Float32 bytes of all parameters, each divided by `shards` of it."""
  sizes = []

  def add(parameter: sharding.Parameter) -> None:
    sizes.append(4 * math.prod(parameter.value.shape) / shards(parameter))

  sharding.map_parameters(add, model)
  return sum(sizes)


def _divisors(number: int) -> list[int]:
  return [n for n in range(1, number + 1) if number % n == 0]
