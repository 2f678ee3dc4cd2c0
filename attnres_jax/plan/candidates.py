# SPDX-License-Identifier: Apache-2.0
"""Ways to run a config on a slice, ordered by few rules; nothing is compiled.

A plan has a mesh (data, fsdp, expert), microbatches and `model.remat`.
`mesh.tensor` stays as the config has it. Plans of which a device keeps far
more than its memory are dropped. The rest is ordered by these rules, and the
compiler judges the first (`search`):

  1. a device keeps at most three quarters of its memory, and above that, less:
     what other sublayers than experts need beside it is not counted
  2. least is computed again: remat is none, dots, attention, full
  3. fsdp cuts the width into whole tiles
  4. fewest microbatches
  5. a device sends the fewest bytes
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from attnres_jax import config as config_lib
from attnres_jax.common import chips
from attnres_jax.common import plans as plans_lib
from attnres_jax.common import sharding
from attnres_jax.common import topology
from attnres_jax.models import linear
from attnres_jax.models import loss
from attnres_jax.models import sublayer
from attnres_jax.plan import least
from attnres_jax.plan import report as report_lib
from attnres_jax.train import train_state

_GIB = 2**30
_TILE = 128  # columns of a tile in a TPU's memory
# Without checkpointing, autodiff keeps about this many times the results of the
# products (in those of 194M); more where layers are a scan.
_UNCHECKPOINTED, _SCANNED = 1.7, 3.0
# A sublayer of experts holds this many bytes per number of each token that a
# device gathers: tokens, gradients, rows of each, sums in float32.
_GATHERED_BYTES = 22
# Logits of a tile take at most this share of the memory: their powers of e, and
# on some chips their gradients, both in the dtype of products.
_LOGITS, _LOGIT_ARRAYS = 0.1, 2
# Shares of the memory: of the first rule, and above which a plan is dropped. Of
# the plans in configs/plans.csv, the compiler needs 0.7 to 1.7 times the count.
_SAFE, _SURE = 0.75, 1.25
# Values of `model.remat`, in the order of the second.
_REMAT = ("none", "dots", "attention", "full")


@dataclasses.dataclass(frozen=True)
class Plan:
  """One way to run a config.

  Attributes:
    overrides: of the config's fields.
    kept_bytes: per device: state, gradients, weights of products, activations
      that are kept, logits of a tile, and what a sublayer of experts holds.
      Other sublayers' own work comes on top.
    order: what the rules compare, one after another.
  """

  overrides: Mapping[str, Any]
  kept_bytes: float
  order: tuple[float, ...]

  def apply(self, config: config_lib.RunConfig) -> config_lib.RunConfig:
    """The config with these fields."""
    return plans_lib.apply(config, self.overrides)


def plans(
  config: config_lib.RunConfig,
  devices: Sequence[Any],
) -> tuple[list[Plan], dict[str, int]]:
  """All plans that fit by arithmetic, in order; and why others do not.

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
  state, kept_per_token = _state_and_kept(config, devices)
  saved = _saved_bytes(config.model)
  offered, dropped = [], dict[str, int]()

  def drop(reason: str) -> None:
    dropped[reason] = dropped.get(reason, 0) + 1

  for mesh in _meshes(config, len(devices)):
    meshed = dataclasses.replace(config, mesh=mesh)
    try:
      device = _Device.of(meshed, devices, state)
    except config_lib.ConfigError as error:
      drop(str(error).partition(",")[0])
      continue
    axes = sharding.DATA, sharding.FSDP, sharding.EXPERT
    fields = {f"mesh.{axis}": getattr(mesh, axis) for axis in axes}
    ragged = mesh.fsdp > 1 and config.model.width % (mesh.fsdp * _TILE) > 0
    rows = config.data.batch_size // (mesh.data * mesh.fsdp * mesh.expert)
    for accumulate, remat in itertools.product(_divisors(rows), _REMAT):
      per_token = kept_per_token + saved[remat]
      tiles = _tiles(config, chip, rows // accumulate)
      tile = tiles.get("loss.tile_tokens") or config.loss.tile_tokens
      tile = tile or loss.TILE_TOKENS
      nbytes = device.kept_bytes(accumulate, remat, per_token, tile)
      if nbytes > _SURE * chip.hbm_bytes:
        drop(f"more than {chip.hbm_bytes / _GIB:.0f} GiB by arithmetic")
        continue
      overrides = fields | {
        "optim.accumulate_steps": accumulate,
        "model.remat": remat,
        **tiles,
      }
      order = (
        max(nbytes / chip.hbm_bytes, _SAFE),
        _REMAT.index(remat),
        ragged,
        accumulate,
        device.sent_bytes(accumulate, remat),
      )
      offered.append(Plan(overrides, nbytes, order))
  return sorted(offered, key=lambda plan: plan.order), dropped


def _tiles(
  config: config_lib.RunConfig, chip: chips.Chip, rows: int
) -> dict[str, int]:
  """Tiles of the loss, if the default ones would not suit the memory.

  Every tile adds a gradient of the head, so they should be as large as fits.
  Each of the rows has a power of two tokens in a tile, so that the last one is
  not filled up.
  """
  vocab_size = config.model.vocab_size
  small = loss.TILE_BYTES // (4 * vocab_size) > loss.TILE_TOKENS
  if config.loss.tile_tokens or small:
    return {}
  itemsize = _LOGIT_ARRAYS * jnp.dtype(config.model.dtype).itemsize
  fits = _LOGITS * chip.hbm_bytes / (itemsize * vocab_size)
  tile = rows * 2 ** max(0, int(math.log2(fits / rows)))
  return {} if tile == loss.TILE_TOKENS else {"loss.tile_tokens": tile}


def _state_and_kept(
  config: config_lib.RunConfig, devices: Sequence[Any]
) -> tuple[Any, float]:
  """The abstract `TrainState`; bytes per token kept with remat=full."""
  smallest = dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, remat="full"),
    data=dataclasses.replace(config.data, batch_size=1),
    mesh=config_lib.MeshConfig(data=1),
  )
  mesh = sharding.make_mesh(smallest.mesh, devices[:1])
  program = train_state.make_program(smallest, mesh)
  saved = program.network.kept_bytes(program.abstract_state.model)
  per_token = sum(saved.values()) / config.data.sequence_length
  return program.abstract_state, per_token


@dataclasses.dataclass(frozen=True)
class _Device:
  """Bytes of one device of a mesh.

  Attributes:
    config: with the mesh.
    state: of parameters, their average and the optimiser, at rest.
    gradient: the float32 gradient, as parameters are at rest.
    gathered: parameters that a device computes with, in the dtype of products.
    tokens: of a device and step.
  """

  config: config_lib.RunConfig
  state: float
  gradient: float
  gathered: float
  tokens: float

  @classmethod
  def of(
    cls, config: config_lib.RunConfig, devices: Sequence[Any], state: Any
  ) -> "_Device":
    mesh: Mesh = sharding.make_mesh(config.mesh, devices)
    sharding.check_divides(config, mesh)
    state = sharding.with_sharding(state, sharding.state_sharding(state, mesh))
    stay = sharding.EXPERT, sharding.TENSOR
    used = _bytes_with(
      state.model,
      lambda p: math.prod(
        mesh.shape[axis] for axis in stay if axis in sharding.axes_at_rest(p)
      ),
    )
    data = config.data
    shards = sharding.num_row_shards(mesh) * mesh.shape[sharding.TENSOR]
    return cls(
      config,
      state=sharding.bytes_per_device(state),
      gradient=sharding.bytes_per_device(state.model),
      gathered=used / 4 * jnp.dtype(config.model.dtype).itemsize,
      tokens=data.batch_size * data.sequence_length / shards,
    )

  def kept_bytes(
    self, accumulate: int, remat: str, per_token: float, tile: int
  ) -> float:
    """What a device holds at the end of the forward or of the backward pass.

    A microbatch's gradient is added to the sum once it is complete.

    Args:
      accumulate: microbatches.
      remat: `model.remat`.
      per_token: bytes of activations that are kept of each.
      tile: tokens of a tile of the loss.
    """
    model, experts = self.config.model, self.config.mesh.expert
    itemsize = jnp.dtype(model.dtype).itemsize
    tokens = self.tokens / accumulate
    activations = tokens * per_token
    if accumulate > 1:
      activations = max(activations, self.gradient)
    layers = model.sublayer_kinds.count("moe")
    if layers and experts > 1:
      activations += tokens * _GATHERED_BYTES * experts * model.width
      if remat == "none":
        # The compiler merges what the backward pass computes again with the
        # forward pass: gathered tokens, and the rows, gate and up of a pair.
        pair = model.width + 2 * model.moe.expert_width
        numbers = experts * model.width + model.moe.top_k * pair
        activations += tokens * layers * itemsize * numbers
    logits = min(tokens, tile) * model.vocab_size * _LOGIT_ARRAYS * itemsize
    return self.state + self.gradient + self.gathered + activations + logits

  def sent_bytes(self, accumulate: int, remat: str) -> float:
    """Weights and tokens of every pass, and gradients, over all links."""
    model, mesh = self.config.model, self.config.mesh
    passes = 2 + (remat not in least.KEEP_PRODUCTS)
    # Of weights that fsdp cuts, float32 gradients are sent, too.
    sent = accumulate * self.gathered * (1 - 1 / mesh.fsdp) * (passes + 2)
    sent += 2 * self.gradient * (1 - 1 / mesh.data)
    # Experts are sent tokens, and return as many.
    vector = model.width * jnp.dtype(model.dtype).itemsize
    layers = model.sublayer_kinds.count("moe")
    return sent + 2 * passes * layers * self.tokens * vector * (mesh.expert - 1)


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
      if model.moe.num_experts % (expert * fsdp):
        continue
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
      jaxpr = jax.make_jaxpr(lambda core, x_BTD: core(x_BTD))(core, x_BTD)
    each[kind] = sum(
      math.prod(v.aval.shape) * v.aval.dtype.itemsize
      for equation in report_lib.equations(jaxpr.jaxpr)
      if equation.params.get("name") == linear.PRODUCT
      for v in equation.outvars
    )
  products = sum(each[kind] for kind in model.sublayer_kinds) / length
  unchecked = _SCANNED if model.scan_layers else _UNCHECKPOINTED
  share = {"none": unchecked, "dots": 1.0}
  return {remat: share.get(remat, 0.0) * products for remat in _REMAT}


def _bytes_with(model: Any, shards: Callable[[Any], float]) -> float:
  """Float32 bytes of all parameters, each divided by `shards` of it."""
  sizes = []

  def add(parameter: sharding.Parameter) -> None:
    sizes.append(4 * math.prod(parameter.value.shape) / shards(parameter))

  sharding.map_parameters(add, model)
  return sum(sizes)


def _divisors(number: int) -> list[int]:
  return [n for n in range(1, number + 1) if number % n == 0]
