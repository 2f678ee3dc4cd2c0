# SPDX-License-Identifier: Apache-2.0
"""Residual schemes: what each sublayer reads of the earlier outputs.

Symbols of arXiv:2603.15031 and their names here:

  L       sublayers of the network     ModelConfig.num_sublayers
  l       a sublayer, counted from 1   l = start + 1 + position in the segment
  v_0     token embedding, = h_1       embedding_BTD
  v_l     output of sublayer l         y_BTD
  h_l     input of sublayer l          h_BTD, what `read` normalises
  w_l     pseudo-query                 depth_read.DepthQueries.query
  g_l     key-norm gain                depth_read.DepthQueries.gain
  S, N    sublayers per block, blocks  ResidualConfig.block_size, num_blocks
  b_n     block representation         BlockState.blocks[n]
  b_n^i   partial sum of a block       BlockState.partial, and the carry
"""

import importlib

from flax import nnx
import jax

from attnres_jax import config as config_lib
from attnres_jax.config.schemes import SCHEMES
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals.base import QKV
from attnres_jax.models.residuals.base import Residual
from attnres_jax.models.residuals.base import run_through
from attnres_jax.models.residuals.styles import Style

__all__ = [
  "QKV",
  "RESIDUALS",
  "Residual",
  "Style",
  "abstract_residual",
  "build_residual",
  "families",
  "headline",
  "run_through",
  "scheme_named",
  "scheme_of",
]

# Name -> class; `config.schemes` lists them.
RESIDUALS: dict[str, type[base.Residual]] = {
  name: getattr(importlib.import_module(f"{__name__}.{file}"), scheme)
  for file, schemes in SCHEMES.items()
  for name, scheme in schemes.items()
}


def build_residual(
  config: config_lib.ModelConfig, *, rngs: nnx.Rngs
) -> base.Residual:
  """The scheme of `config.residual`.

  Raises:
    ConfigError: there is no such scheme; lists the schemes by family.
  """
  return scheme_of(config)(config, rngs=rngs)


def scheme_of(config: config_lib.ModelConfig) -> type[base.Residual]:
  """The class of `build_residual`."""
  return scheme_named(config.residual.name)


def scheme_named(name: str) -> type[base.Residual]:
  """The class of a scheme; raises as `build_residual` does."""
  return config_lib.choose(
    "model.residual.name", name, RESIDUALS, families=families()
  )


def abstract_residual(config: config_lib.ModelConfig) -> base.Residual:
  """The scheme with abstract arrays, which takes no memory."""
  return jax.eval_shape(lambda: build_residual(config, rngs=nnx.Rngs(params=0)))


def headline() -> tuple[str, ...]:
  """The schemes that tables list beside any other."""
  return tuple(name for name, s in RESIDUALS.items() if s.headline)


def families() -> dict[str, list[str]]:
  """The names of all schemes by family, which is the file that defines them."""
  names: dict[str, list[str]] = {}
  for name, scheme in RESIDUALS.items():
    family = scheme.__module__.rpartition(".")[2]
    names.setdefault(family, []).append(name)
  return names
