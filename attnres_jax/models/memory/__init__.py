# SPDX-License-Identifier: Apache-2.0
"""Depth memories: what a mixer keeps for later mixers of the same token."""

from flax import nnx

from attnres_jax import config as config_lib
from attnres_jax.models.memory import base
from attnres_jax.models.memory import depth_attention
from attnres_jax.models.memory import moda
from attnres_jax.models.memory import value_residual
from attnres_jax.models.memory.base import Call
from attnres_jax.models.memory.base import DepthMemory
from attnres_jax.models.memory.base import NoMemory

__all__ = ["DEPTH_MEMORY", "Call", "DepthMemory", "NoMemory", "build_memory"]

DEPTH_MEMORY: dict[str, type[base.DepthMemory]] = {
  "none": base.NoMemory,
  "value_residual": value_residual.ValueResidual,
  "value_residual_learned": value_residual.LearnedValueResidual,
  "svformer": value_residual.SvFormer,
  "depth_attention": depth_attention.DepthAttention,
  "moda": moda.Moda,
}


def build_memory(
  config: config_lib.ModelConfig, *, rngs: nnx.Rngs
) -> base.DepthMemory:
  """The depth memory of `config.depth_memory`.

  Raises:
    ConfigError: there is no such memory, or the network has no mixers for it.
  """
  memory = config_lib.choose(
    "model.depth_memory", config.depth_memory, DEPTH_MEMORY
  )
  return memory(config, rngs=rngs)
