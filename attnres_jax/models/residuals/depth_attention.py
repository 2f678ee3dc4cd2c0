# SPDX-License-Identifier: Apache-2.0
"""Shared by Full and Block AttnRes: queries, and one softmax over depth.

Every token attends over its own depth, so each device runs the operators of
`attnres_kernels` on its own tokens. Without a mesh, the functions here are
those operators.

For FLOPs, a (query, source) pair counts as a dot product and a weighted sum,
and a source as one mean square, however often its norm is recomputed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax import precision
from attnres_jax import sharding
from attnres_jax.models import linear
from attnres_jax.models import norm as norm_lib
from attnres_jax.models.residuals import base
import attnres_kernels


class DepthQueries(nnx.Module):
  """Pseudo-queries and key-norm gains of the L sublayers and of the readout.

  With zero queries and unit gains, every softmax starts uniform
  (arXiv:2603.15031 section 5: zero is crucial). The first sublayer has one
  source, so its row gets no gradient; it is kept for uniform shapes.
  """

  def __init__(self, config: config_lib.ModelConfig):
    shape = (config.num_sublayers + 1, config.width)
    # No decay: it would pull every softmax back to uniform.
    options = dict(axes="LD", decays=False)
    self.query = nnx.Param(jnp.zeros(shape, jnp.float32), **options)
    self.gain = nnx.Param(jnp.ones(shape, jnp.float32), **options)

  def folded(self, start: int, stop: int) -> jax.Array:
    """u_l = w_l * g_l of reads start..stop-1 (from 0): [Q, D], float32."""
    return self.query[start:stop] * self.gain[start:stop]


class Slot(NamedTuple):
  """The inputs of one sublayer's phase 2: its query and phase-1 results.

  An `lse_BT` of +inf means that the open source has no weight, whatever it
  contains. The first sublayer of a block then reads as in Eq. 6, without a
  special case in the loop.
  """

  query_D: jax.Array
  out_BTD: jax.Array
  lse_BT: jax.Array

  def merge(self, open_BTD: jax.Array, eps: float) -> jax.Array:
    """The mixture with the open source as one more source."""
    return depth_merge(
      self.out_BTD, self.lse_BT, self.query_D, open_BTD, eps=eps
    )

  def merge_normed(
    self, open_BTD: jax.Array, norm: norm_lib.RMSNorm, eps: float
  ) -> jax.Array:
    """norm(merge(...)) in one pass over memory."""
    return depth_merge_norm(
      self.out_BTD,
      self.lse_BT,
      self.query_D,
      open_BTD,
      norm.gain[...],
      eps=eps,
      norm_eps=norm.eps,
    )


class DepthAttention(base.Residual):
  """Shared by Full and Block AttnRes: queries, and one softmax over sources.

  Attributes:
    eps: added to the mean square of a source before it is scored.
    queries: of the L sublayers and of the readout.
  """

  scannable = False

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.eps = config.norm_eps
    self.queries = DepthQueries(config)

  def attend(
    self, query_D: jax.Array, sources: tuple[jax.Array, ...]
  ) -> jax.Array:
    """The mixture of Eq. 2-4 [B, T, D]; a single source is returned as is."""
    if len(sources) == 1:
      return sources[0]
    if base.coefficients_are_fixed():
      weight_MBT = base.coefficient(softmax_weights(query_D, sources, self.eps))
      out_BTD = jnp.einsum("MBT,MBTD->BTD", weight_MBT, jnp.stack(sources))
      return out_BTD.astype(self.dtype)
    out_QBTD, _ = depth_attention(query_D[None], sources, eps=self.eps)
    return out_QBTD[0]

  def attend_last(self, sources: tuple[jax.Array, ...]) -> jax.Array:
    """The readout: the mixture with its own query."""
    last = self.num_sublayers
    return self.attend(self.queries.folded(last, last + 1)[0], sources)


def softmax_weights(
  query_D: jax.Array, sources: Sequence[jax.Array], eps: float
) -> jax.Array:
  """Weights [M, B, T] of Eq. 2-4, written like the definition."""
  scores = []
  for source_BTD in sources:
    source_BTD = precision.widen(source_BTD)
    mean_square_BT = jnp.mean(jnp.square(source_BTD), axis=-1)
    score_BT = jnp.einsum("D,BTD->BT", query_D, source_BTD)
    scores.append(score_BT * jax.lax.rsqrt(mean_square_BT + eps))
  return jax.nn.softmax(jnp.stack(scores), axis=0)


def depth_attention(
  query_QD: jax.Array, sources: Sequence[jax.Array], *, eps: float
) -> tuple[jax.Array, jax.Array]:
  """`attnres_kernels.depth_attention` of [B, T, D] sources."""

  def attend(query_QD, sources):
    return attnres_kernels.depth_attention(query_QD, sources, eps=eps)

  many = sharding.QUERIED_TOKENS
  in_specs = sharding.WHOLE, sharding.TOKENS
  split = sharding.by_shards(attend, in_specs, (many, many))
  sources = tuple(sources)
  first, num_queries = sources[0], query_QD.shape[0]
  out_QBTD = jax.ShapeDtypeStruct((num_queries, *first.shape), first.dtype)
  lse_QBT = jax.ShapeDtypeStruct(out_QBTD.shape[:-1], jnp.float32)
  return linear.counted(
    split, query_QD, sources, flops=4 * len(sources) * out_QBTD.size,
    scanned=sources, outs=(out_QBTD, lse_QBT),
  )  # fmt: skip


def depth_merge(
  out_BTD: jax.Array,
  lse_BT: jax.Array,
  query_D: jax.Array,
  partial_BTD: jax.Array,
  *,
  eps: float,
) -> jax.Array:
  """`attnres_kernels.depth_merge`."""

  def merge(out_BTD, lse_BT, query_D, partial_BTD):
    return attnres_kernels.depth_merge(
      out_BTD, lse_BT, query_D, partial_BTD, eps=eps
    )

  tokens = sharding.TOKENS
  in_specs = tokens, tokens, sharding.WHOLE, tokens
  split = sharding.by_shards(merge, in_specs, tokens)
  return linear.counted(
    split, out_BTD, lse_BT, query_D, partial_BTD,
    flops=4 * partial_BTD.size, scanned=partial_BTD, outs=out_BTD,
  )  # fmt: skip


def depth_merge_norm(
  out_BTD: jax.Array,
  lse_BT: jax.Array,
  query_D: jax.Array,
  partial_BTD: jax.Array,
  gain_D: jax.Array,
  *,
  eps: float,
  norm_eps: float,
) -> jax.Array:
  """The normalised merge of `attnres_kernels.depth_merge_norm`.

  The kernel could also add the last output to the open sum. Instead, the matrix
  product that computes the output adds it, and then writes no output at all.
  """

  def merge(out_BTD, lse_BT, query_D, partial_BTD, gain_D):
    _, normed_BTD = attnres_kernels.depth_merge_norm(
      out_BTD, lse_BT, query_D, partial_BTD, None, gain_D,
      eps=eps, norm_eps=norm_eps,
    )  # fmt: skip
    return normed_BTD

  tokens, whole = sharding.TOKENS, sharding.WHOLE
  split = sharding.by_shards(
    merge, (tokens, tokens, whole, tokens, whole), tokens
  )
  return linear.counted(
    split, out_BTD, lse_BT, query_D, partial_BTD, gain_D,
    flops=4 * partial_BTD.size, scanned=partial_BTD, outs=out_BTD,
  )  # fmt: skip
