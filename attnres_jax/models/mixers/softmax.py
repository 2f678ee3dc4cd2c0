# SPDX-License-Identifier: Apache-2.0
"""Causal softmax attention over projected heads, in tiles of queries.

`jax.nn.dot_product_attention` wants values as wide as keys, and on CPU and TPU
it holds the weights of all T x T pairs, which at T = 8192 and 32 heads are 8
GiB per row of the batch. Here a tile of queries meets the keys before it, and
backward computes the weights of a tile again: memory is linear in T. Flash
attention from tokamax takes over where it is installed and takes the shapes.
"""

import functools

import jax
import jax.numpy as jnp

from attnres_jax.models import optional_kernels

# Queries of a tile: products large enough for a matrix unit.
TILE = 512
# Spans of tiles that see keys up to the end of their span: n programs instead
# of one cost 1 + 1/n of what exact causality would, instead of twice as much.
_SPANS = 4


def causal_attention(
  query_BTNH: jax.Array,
  key_BTKH: jax.Array,
  value_BTKV: jax.Array,
  segment_ids_BT: jax.Array | None = None,
  *,
  tile: int = TILE,
) -> jax.Array:
  """Attends to positions s <= t, inside a document with segment ids.

  Args:
    query_BTNH: queries of N heads.
    key_BTKH: keys of K heads, a divisor of N; scores are q . k / sqrt(H).
    value_BTKV: values, of any width V.
    segment_ids_BT: document numbers of packed rows.
    tile: queries that are computed at once; does not change the function.

  Returns:
    [B, T, N, V] in the dtype of the values; the softmax is in float32.
  """
  flash = optional_kernels.tokamax("dot_product_attention")
  if flash is not None:
    mask_BNTS = None
    if segment_ids_BT is not None:
      mask_BNTS = _same_segment(segment_ids_BT, segment_ids_BT)[:, None]
    found = optional_kernels.attempt(
      flash,
      query_BTNH,
      key_BTKH,
      value_BTKV,
      mask=mask_BNTS,
      is_causal=True,
      implementation=("mosaic", "triton"),
    )
    if found is not None:
      return found[0]
  return _tiled(tile, query_BTNH, key_BTKH, value_BTKV, segment_ids_BT)


def attend(
  query_BTNH: jax.Array,
  key_BSKH: jax.Array,
  value_BSKV: jax.Array,
  mask_BTS: jax.Array,
  scale: float,
) -> jax.Array:
  """Softmax attention where the mask ([1 or B, T, S]) is true, all at once."""
  batch, length, heads, width = query_BTNH.shape
  kv_heads = key_BSKH.shape[2]
  wide = jnp.promote_types(query_BTNH.dtype, jnp.float32)
  query_BTKGH = jnp.reshape(
    query_BTNH, (batch, length, kv_heads, heads // kv_heads, width)
  )
  logits_BKGTS = scale * jnp.einsum(
    "BTKGH,BSKH->BKGTS", query_BTKGH, key_BSKH, preferred_element_type=wide
  )
  weight_BKGTS = jax.nn.softmax(
    jnp.where(mask_BTS[:, None, None], logits_BKGTS, jnp.finfo(wide).min)
  )
  mixed_BTKGV = jnp.einsum(
    "BKGTS,BSKV->BTKGV",
    weight_BKGTS.astype(value_BSKV.dtype),
    value_BSKV,
    preferred_element_type=wide,
  )
  return jnp.reshape(
    mixed_BTKGV.astype(value_BSKV.dtype), (batch, length, heads, -1)
  )


# Nothing but the arguments is kept for backward: tiles are checkpointed one by
# one, and the wide copies of keys and values are made again.
@functools.partial(jax.checkpoint, static_argnums=(0,))
def _tiled(tile, query_BTNH, key_BTKH, value_BTKV, segment_ids_BT):
  length = query_BTNH.shape[1]
  tile = min(tile, length)
  num_tiles = -(-length // tile)
  tiles = dict(
    position=jnp.arange(num_tiles * tile).reshape(num_tiles, tile),
    query=_cut(query_BTNH, num_tiles, tile),
  )
  if segment_ids_BT is not None:
    tiles["segment"] = _cut(segment_ids_BT, num_tiles, tile)
  # The gradients of keys and values are sums over tiles, in this dtype.
  wide = jnp.promote_types(query_BTNH.dtype, jnp.float32)
  key_BTKH, value_BTKV = key_BTKH.astype(wide), value_BTKV.astype(wide)
  per_span = -(-num_tiles // _SPANS)
  spans = []
  for first in range(0, num_tiles, per_span):
    span = slice(first, min(first + per_span, num_tiles))
    keys = slice(span.stop * tile)
    one_tile = functools.partial(
      _one_tile,
      key_BSKH=key_BTKH[:, keys],
      value_BSKV=value_BTKV[:, keys],
      key_segment_BS=jax.tree.map(
        lambda x, keys=keys: x[:, keys], segment_ids_BT
      ),
    )
    queries = {name: x[span] for name, x in tiles.items()}
    spans.append(jax.lax.map(one_tile, queries))
  mixed_XBCNV = jnp.concatenate(spans)
  mixed_BXCNV = jnp.moveaxis(mixed_XBCNV, 0, 1)
  return jax.lax.collapse(mixed_BXCNV, 1, 3)[:, :length]


@jax.checkpoint
def _one_tile(tile, key_BSKH, value_BSKV, key_segment_BS):
  dtype = tile["query"].dtype
  position_S = jnp.arange(key_BSKH.shape[1])
  mask_BTS = (tile["position"][:, None] >= position_S[None])[None]
  if key_segment_BS is not None:
    mask_BTS &= _same_segment(tile["segment"], key_segment_BS)
  return attend(
    tile["query"],
    key_BSKH.astype(dtype),
    value_BSKV.astype(dtype),
    mask_BTS,
    key_BSKH.shape[-1] ** -0.5,
  )


def _cut(x_BT, num_tiles, tile):
  """[B, T, ...] into tiles [X, B, C, ...]; the last one is padded."""
  missing = num_tiles * tile - x_BT.shape[1]
  padding = ((0, 0), (0, missing)) + ((0, 0),) * (x_BT.ndim - 2)
  x_BT = jnp.pad(x_BT, padding)
  shape = (x_BT.shape[0], num_tiles, tile, *x_BT.shape[2:])
  return jnp.moveaxis(jnp.reshape(x_BT, shape), 1, 0)


def _same_segment(query_BT, key_BS):
  return query_BT[:, :, None] == key_BS[:, None]
