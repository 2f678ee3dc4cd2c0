# SPDX-License-Identifier: Apache-2.0
"""Pipelines of real networks, small enough to compile in seconds."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax import loss as loss_lib
from attnres_jax import models
from attnres_jax import sharding
from attnres_jax.pipeline import spmd


class Variant(NamedTuple):
  """What is compared: a residual scheme, sent by a rule."""

  scheme: str
  rule: str = "minimum"
  schedule: str = "fused"


VARIANTS = {
  "prenorm": Variant("prenorm"),
  "block minimum": Variant("block_attnres"),
  "block cached": Variant("block_attnres", rule="cached"),
  "block naive": Variant("block_attnres", rule="naive"),
  "block autodiff": Variant("block_attnres", schedule="gpipe"),
}


class Size(NamedTuple):
  """Of a pipeline and its network.

  Attributes:
    ranks: P.
    virtual_stages: V.
    data: copies of the pipeline.
    sublayers: L.
    block_size: S, sublayers of a block.
    width: of the model.
    length: tokens of a row; a microbatch is a row on each copy.
    dtype: of activations.
  """

  ranks: int
  virtual_stages: int
  data: int
  sublayers: int
  block_size: int
  width: int
  length: int
  dtype: str

  @property
  def vector_bytes(self) -> int:
    """Of the unit in which transfers are counted."""
    return self.length * self.width * jnp.dtype(self.dtype).itemsize


def make_config(
  variant: str, size: Size, microbatches: int
) -> config_lib.RunConfig:
  """A step of M microbatches; the vocabulary is small beside the width."""
  scheme, rule, schedule = VARIANTS[variant]
  return config_lib.RunConfig(
    model=config_lib.ModelConfig(
      vocab_size=256,
      width=size.width,
      num_layers=size.sublayers // 2,
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
  """A pipeline over devices of a topology, by default those of this process."""
  mesh = sharding.make_mesh(config.mesh, devices)
  return spmd.make_pipeline(config, mesh, **network)


def lower(config: config_lib.RunConfig, pipeline: spmd.Pipeline) -> Any:
  """Loss and gradient of a batch, to be compiled; no optimiser."""
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
