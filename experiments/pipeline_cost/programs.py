# SPDX-License-Identifier: Apache-2.0
"""Pipelines of real networks, small enough to compile in seconds.

Their time on eight CPU devices, and their temporary memory on a TPU slice.
"""

from collections.abc import Callable, Iterator
import functools
import statistics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import loss as loss_lib
from attnres_jax import models
from attnres_jax import sharding
from attnres_jax.aot import topology
from attnres_jax.pipeline import spmd
from experiments import measure

Row = dict[str, Any]


class Variant(NamedTuple):
  """A residual scheme and a rule of transfers, to be compared."""

  scheme: str
  rule: Any = "minimum"
  schedule: Any = "fused"


VARIANTS = {
  "prenorm": Variant("prenorm"),
  "block minimum": Variant("block_attnres"),
  "block cached": Variant("block_attnres", rule="cached"),
  "block naive": Variant("block_attnres", rule="naive"),
  "block autodiff": Variant("block_attnres", schedule="gpipe"),
}


class Size(NamedTuple):
  """The sizes of a pipeline and its network.

  Attributes:
    ranks: P.
    virtual_stages: V.
    data: copies of the pipeline.
    sublayers: L.
    block_size: S, sublayers per block.
    width: of the model.
    length: tokens per row; a microbatch has one row per copy.
    dtype: of activations.
  """

  ranks: int
  virtual_stages: int
  data: int
  sublayers: int
  block_size: int
  width: int
  length: int
  dtype: Any

  @property
  def vector_bytes(self) -> int:
    """Bytes of the unit in which transfers are counted."""
    return self.length * self.width * jnp.dtype(self.dtype).itemsize


_CPU_SIZE = Size(
  ranks=4, virtual_stages=2, data=2, sublayers=8, block_size=2,
  width=64, length=128, dtype="float32",
)  # fmt: skip
_TIMED = ("prenorm", "block minimum", "block cached", "block naive")
_TOPOLOGY = "v5e:2x4"
_TPU_SIZE = Size(
  ranks=2, virtual_stages=2, data=4, sublayers=8, block_size=2,
  width=256, length=256, dtype="bfloat16",
)  # fmt: skip
_COMPILED = ("prenorm", "block minimum", "block naive", "block autodiff")


def make_config(
  variant: Variant, size: Size, microbatches: int
) -> config_lib.RunConfig:
  """A step of M microbatches, with a small vocabulary."""
  scheme, rule, schedule = variant
  return config_lib.RunConfig(
    model=config_lib.ModelConfig(
      vocab_size=256,
      width=size.width,
      num_layers=-(-size.sublayers // 2),
      num_heads=max(1, size.width // 64),
      mlp_width=2 * size.width,
      dtype=size.dtype,
      residual=config_lib.ResidualConfig(scheme, block_size=size.block_size),
    ),
    data=config_lib.DataConfig(
      sequence_length=size.length, batch_size=microbatches * size.data
    ),
    mesh=config_lib.MeshConfig(stage=size.ranks, data=size.data),
    pipeline=config_lib.PipelineConfig(
      size.virtual_stages, microbatches, schedule, rule
    ),
  )


def make_pipeline(
  config: config_lib.RunConfig, devices: Any = None, **network: Any
) -> spmd.Pipeline:
  """A pipeline over devices of a topology; by default those of this process."""
  mesh = sharding.make_mesh(config.mesh, devices)
  return spmd.make_pipeline(config, mesh, **network)


def lower(config: config_lib.RunConfig, pipeline: spmd.Pipeline) -> Any:
  """Loss and gradient of a batch, to be compiled, without optimiser."""
  mesh = pipeline.placement.mesh
  model = jax.eval_shape(lambda: models.build_model(config.model))
  model = sharding.with_sharding(model, sharding.state_sharding(model, mesh))
  rows: Any = jax.ShapeDtypeStruct(
    (config.data.batch_size, config.data.sequence_length),
    jnp.int32,
    sharding=sharding.batch_sharding(mesh),
  )
  weights: Any = rows.update(dtype=jnp.float32)
  examples = loss_lib.Examples(rows, rows, weights, None)
  return jax.jit(pipeline.value_and_grad).lower(model, examples)


def step_times(rounds: int) -> Iterator[Row]:
  """A row per variant: medians over rounds and quartiles of the ratios.

  All are compiled first and then run in turn, in alternating order. A ratio is
  a variant's time over PreNorm's in the same round. `cpu` is the processor time
  of all devices together, which other processes affect less than `wall` time,
  and which does not include waiting for messages.
  """
  calls = {variant: _program(variant) for variant in _TIMED}
  times = measure.in_turn(calls, rounds)
  for variant in _TIMED:
    row = dict(variant=variant, rounds=rounds)
    for clock in measure.Seconds._fields:
      own = [getattr(seconds, clock) for seconds in times[variant]]
      base = [getattr(seconds, clock) for seconds in times["prenorm"]]
      ratios = np.asarray(own) / np.asarray(base)
      low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
      row |= {
        f"{clock}_ratio": round(float(middle), 4),
        f"{clock}_ratio_low": round(float(low), 4),
        f"{clock}_ratio_high": round(float(high), 4),
        f"{clock}_seconds": round(statistics.median(own), 4),
      }
    yield row


def _program(variant: str) -> Callable[[], Any]:
  """A compiled step of one batch."""
  config = make_config(VARIANTS[variant], _CPU_SIZE, 8)
  pipeline = make_pipeline(config)
  compiled = lower(config, pipeline).compile()
  rng = np.random.default_rng(0)
  shape = config.data.batch_size, config.data.sequence_length + 1
  tokens: Any = rng.integers(0, config.model.vocab_size, shape, dtype=np.int32)
  batch = loss_lib.Examples.of({"tokens": tokens})
  model = models.build_model(config.model)
  arguments = jax.device_put((model, batch), compiled.input_shardings[0])
  return functools.partial(compiled, *arguments)


def temporaries() -> Iterator[Row]:
  """A row per variant and M, from P to 8 P.

  `units` is the temporary memory of a device, as reported by the compiler, over
  a vector of [tokens, width]; `slots` are the planned slots of the pools of
  inputs, blocks and gradients.
  """
  devices = topology.devices(_TOPOLOGY)
  for variant in _COMPILED:
    for microbatches in (_TPU_SIZE.ranks * n for n in (1, 2, 4, 8)):
      yield temporary(variant, microbatches, devices)


def temporary(variant: str, microbatches: int, devices) -> Row:
  """Compiles one step."""
  config = make_config(VARIANTS[variant], _TPU_SIZE, microbatches)
  pipeline = make_pipeline(config, devices)
  memory = lower(config, pipeline).compile().memory_analysis()
  stage = pipeline.stage
  pools = (stage.inputs, stage.blocks, stage.gradients)
  return dict(
    variant=variant,
    P=_TPU_SIZE.ranks,
    V=_TPU_SIZE.virtual_stages,
    M=microbatches,
    temporary_bytes=memory.temp_size_in_bytes,
    units=round(memory.temp_size_in_bytes / _TPU_SIZE.vector_bytes, 2),
    slots=" ".join(str(pool.size) for pool in pools),
    token_bytes=3 * 4 * _TPU_SIZE.length * microbatches,
    compiled_for=_TOPOLOGY,
  )
