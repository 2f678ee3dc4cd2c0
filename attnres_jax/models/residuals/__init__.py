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

from flax import nnx
import jax

from attnres_jax import config as config_lib
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import block_attnres
from attnres_jax.models.residuals import ddl
from attnres_jax.models.residuals import delta
from attnres_jax.models.residuals import dense
from attnres_jax.models.residuals import elmo
from attnres_jax.models.residuals import full_attnres
from attnres_jax.models.residuals import gated_residual
from attnres_jax.models.residuals import highway
from attnres_jax.models.residuals import hyper_connections
from attnres_jax.models.residuals import laurel
from attnres_jax.models.residuals import mhc
from attnres_jax.models.residuals import mrla
from attnres_jax.models.residuals import mudd
from attnres_jax.models.residuals import postnorm
from attnres_jax.models.residuals import prenorm
from attnres_jax.models.residuals import scaled
from attnres_jax.models.residuals import siamesenorm
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
  "scheme_of",
]

# Name -> class.
RESIDUALS: dict[str, type[base.Residual]] = {
  "prenorm": prenorm.PreNorm,
  "rescaled": prenorm.Rescaled,
  "elmo": elmo.Elmo,
  "rezero": scaled.ReZero,
  "layerscale": scaled.LayerScale,
  "laurel_lr": laurel.LaurelLR,
  "highway": highway.Highway,
  "postnorm": postnorm.PostNorm,
  "deepnorm": postnorm.DeepNorm,
  "keel": postnorm.Keel,
  "hybridnorm": postnorm.HybridNorm,
  "siamesenorm": siamesenorm.SiameseNorm,
  "gated_residual": gated_residual.GatedResidual,
  "ddl": ddl.DDL,
  "static_hyper_connections": hyper_connections.StaticHyperConnections,
  "hyper_connections": hyper_connections.HyperConnections,
  "mhc": mhc.MHC,
  "mhc_lite": mhc.MHCLite,
  "full_attnres": full_attnres.FullAttnRes,
  "block_attnres": block_attnres.BlockAttnRes,
  "delta_attnres": delta.DeltaAttnRes,
  "delta_block": delta.DeltaBlock,
  "delta_mh": delta.DeltaHeads,
  "densenet": dense.DenseNet,
  "denseformer": dense.DenseFormer,
  "dwa": dense.Dwa,
  "mrla": mrla.Mrla,
  "mrla_light": mrla.MrlaLight,
  "mrla_linear": mrla.MrlaLinear,
  "mudd": mudd.Mudd,
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
  return config_lib.choose(
    "model.residual.name", config.residual.name, RESIDUALS, families=families()
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
