# SPDX-License-Identifier: Apache-2.0
"""Depth attention over tokens that are sharded over a mesh.

Every token attends over its own depth, so devices do not exchange tokens: each
runs the operators of `attnres_kernels` on its own tokens. Without an ambient
mesh, these are those operators.

For FLOPs, a (query, source) pair counts as a dot product and a weighted sum,
and a source as one mean square, however often its norm is recomputed.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from attnres_jax import sharding
from attnres_jax.models import cost
import attnres_kernels


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
  return cost.counted(
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
  return cost.counted(
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
  return cost.counted(
    split, out_BTD, lse_BT, query_D, partial_BTD, gain_D,
    flops=4 * partial_BTD.size, scanned=partial_BTD, outs=out_BTD,
  )  # fmt: skip
