# SPDX-License-Identifier: Apache-2.0
"""Residual schemes: what each sublayer reads of the earlier outputs.

Symbols of arXiv:2603.15031 and their names here:

  L       sublayers of the network     ModelConfig.num_sublayers
  l       a sublayer, counted from 1   l = start + 1 + position in the segment
  v_0     token embedding, = h_1       embedding_BTD
  v_l     output of sublayer l         y_BTD
  h_l     input of sublayer l          h_BTD, what `read` returns
  w_l     pseudo-query                 DepthQueries.query
  g_l     key-norm gain                DepthQueries.gain
  S, N    sublayers per block, blocks  ResidualConfig.block_size, num_blocks
  b_n     block representation         BlockState.blocks[n]
  b_n^i   partial sum of a block       BlockState.partial, and the carry
"""

from attnres_jax import config as config_lib
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import block_attnres
from attnres_jax.models.residuals import full_attnres
from attnres_jax.models.residuals import prenorm
from attnres_jax.models.residuals.base import Residual
from attnres_jax.models.residuals.base import Style
from attnres_jax.models.residuals.base import run_through

__all__ = ["RESIDUALS", "Residual", "Style", "build_residual", "run_through"]

# Name -> class, in the form that training uses: two-phase if there is one.
RESIDUALS: dict[str, type[base.Residual]] = {
  "prenorm": prenorm.PreNorm,
  "rescaled": prenorm.Rescaled,
  "full_attnres": full_attnres.FullAttnRes,
  "block_attnres": block_attnres.BlockAttnRes,
}


def build_residual(config: config_lib.ModelConfig) -> base.Residual:
  """The scheme of `config.residual`, in the form of `config.residual`."""
  name, form = config.residual.name, config.residual.form
  scheme = config_lib.choose("model.residual.name", name, RESIDUALS)
  if form == "one_softmax" and scheme.definition is not None:
    scheme = scheme.definition
  return scheme(config)
