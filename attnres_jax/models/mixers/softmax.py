# SPDX-License-Identifier: Apache-2.0
"""Causal softmax attention over projected heads, in tiles of queries.

`jax.nn.dot_product_attention` requires values as wide as keys, and on CPU and
TPU it stores the weights of all T x T pairs, which at T = 8192 and 32 heads are
8 GiB per row of the batch. Here a tile of queries attends to the keys before
it, and the backward pass recomputes the weights of a tile, so memory is linear
in T. If the program is lowered for a platform with a fused kernel that supports
the arguments, that kernel is used instead (`flash`).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax import ad_checkpoint
import jax.numpy as jnp

from attnres_jax import precision
from attnres_jax import sharding
from attnres_jax.models import linear
from attnres_jax.models import rounded
from attnres_jax.models.mixers import cache as cache_lib
from attnres_jax.models.mixers import flash
from attnres_kernels import dispatch

# The name by which activation checkpointing recognises the outputs of attention
# and their log-normalisers.
ATTENTION = "attention"

# Queries per tile: products large enough for a matrix unit.
TILE = 512
# Tiles are grouped into n spans, and see keys up to the end of their span. This
# costs 1 + 1/n times as much as exact causality, for n programs; one span would
# cost twice as much.
_SPANS = 4


class Columns(NamedTuple):
  """More columns of a softmax, M for each query.

  Attributes:
    logits_BTNM: their scaled scores, in the dtype of sums.
    value_BTKMV: their values.
  """

  logits_BTNM: jax.Array
  value_BTKMV: jax.Array


def causal_attention(
  query_BTNH: jax.Array,
  key_BTKH: jax.Array,
  value_BTKV: jax.Array,
  segment_ids_BT: jax.Array | None = None,
  *,
  kernel: str = "auto",
  tile: int = TILE,
  columns: Columns | None = None,
) -> jax.Array:
  """Attends to positions s <= t, within a document if segment ids are given.

  Args:
    query_BTNH: queries of N heads.
    key_BTKH: keys of K heads, a divisor of N; scores are q . k / sqrt(H).
    value_BTKV: values, of any width V.
    segment_ids_BT: document numbers of packed rows.
    kernel: a value of `model.attention_kernel`.
    tile: queries per tile without a kernel; does not change the function. 0 for
      all queries at once, which requires values as wide as keys.
    columns: what else each query attends to; no fused kernel has these.

  Returns:
    [B, T, N, V] in the dtype of the values; the softmax is in float32.

  Raises:
    NotImplementedError: the named kernel does not take these arguments, or
      (when the program is lowered) does not run on that platform.
  """
  attention = functools.partial(_attention, kernel, tile)
  if kernel == "tiled":
    attention = functools.partial(_plain, tile)
  arrays = query_BTNH, key_BTKH, value_BTKV, segment_ids_BT
  specs = *[sharding.HEADS] * 3, sharding.SEQUENCES
  *tokens_and_heads, width = query_BTNH.shape
  num_queries, value_width = math.prod(tokens_and_heads), value_BTKV.shape[-1]
  # Causal: half of all pairs count, even if a kernel computes more.
  pairs = num_queries * query_BTNH.shape[1] / 2
  flops = 2 * pairs * (width + value_width)
  if columns is not None:
    attention = functools.partial(_tiled, tile or TILE)
    arrays, specs = (*arrays, columns), (*specs, sharding.HEADS)
    flops += 2 * columns.logits_BTNM.size * value_width
  return linear.counted(
    sharding.by_shards(attention, specs, sharding.HEADS), *arrays,
    part="attention", flops=flops,
    outs=jax.ShapeDtypeStruct(
      (*tokens_and_heads, value_width), value_BTKV.dtype
    ),
  )  # fmt: skip


def extend(
  query_BTNH: jax.Array,
  key_BTKH: jax.Array,
  value_BTKV: jax.Array,
  cache: cache_lib.Tokens | cache_lib.Open,
  chunk: cache_lib.Chunk,
  *,
  kernel: str = "auto",
  tile: int = TILE,
  columns: Columns | None = None,
) -> tuple[jax.Array, cache_lib.Tokens | cache_lib.Stored]:
  """`causal_attention` of new tokens, which also attend to those of a cache.

  With a cache that has no room, they are the first tokens.

  Args:
    query_BTNH: as in `causal_attention`.
    key_BTKH: likewise.
    value_BTKV: likewise.
    cache: keys and values of earlier tokens.
    chunk: the new tokens.
    kernel: as in `causal_attention`, if there are no earlier tokens.
    tile: likewise.
    columns: likewise.

  Returns:
    [B, T, N, V], and what the cache should add.
  """
  new = cache_lib.Tokens(
    (jnp.swapaxes(key_BTKH, 1, 2), jnp.swapaxes(value_BTKV, 1, 2))
  )
  before, added = cache_lib.opened(cache, new, chunk)
  if not before.room:
    return causal_attention(
      query_BTNH, key_BTKH, value_BTKV,
      kernel=kernel, tile=tile, columns=columns,
    ), added  # fmt: skip
  scale = query_BTNH.shape[-1] ** -0.5
  return attend_after(query_BTNH, before, new, chunk, scale, columns), added


def attend_after(
  query_BTNH: jax.Array,
  cache: cache_lib.Tokens,
  new: cache_lib.Tokens,
  chunk: cache_lib.Chunk,
  scale: float,
  columns: Columns | None = None,
) -> jax.Array:
  """Attends to a cache and, causally, to new tokens, in one softmax.

  More queries than `TILE` are in tiles of so many: the scores of a long chunk
  over a long cache would not fit.

  Args:
    query_BTNH: of the new tokens.
    cache: keys and values, or one array that is both.
    new: the same of the new tokens.
    chunk: the new tokens.
    scale: of the scores.
    columns: what else each query attends to.
  """
  length = query_BTNH.shape[1]
  num_tiles = -(-length // TILE)
  one_tile = functools.partial(_after, cache, new, chunk, scale)
  position_T = jnp.arange(length)
  if num_tiles == 1:
    return one_tile((query_BTNH, position_T, columns))
  query_XBCNH, place_X1C, columns = jax.tree.map(
    lambda x: _cut(x, num_tiles, TILE), (query_BTNH, position_T[None], columns)
  )
  tiles = query_XBCNH, place_X1C[:, 0], columns
  mixed_XBCNV = jax.lax.map(one_tile, tiles)
  mixed_BXCNV = jnp.moveaxis(mixed_XBCNV, 0, 1)
  return jax.lax.collapse(mixed_BXCNV, 1, 3)[:, :length]


def _after(cache, new, chunk, scale, tile):
  """`attend_after` of some of the queries, by their places in the chunk."""
  query_BTNH, position_T, columns = tile
  batch, length, heads, width = query_BTNH.shape
  kv_heads = new.arrays[0].shape[1]
  wide = precision.wide(query_BTNH.dtype)
  query_BKGTH = jnp.transpose(
    query_BTNH.reshape(batch, length, kv_heads, -1, width), (0, 2, 3, 1, 4)
  )
  before_BS = jnp.arange(cache.room)[None] < chunk.start_B[:, None]
  causal_TS = position_T[:, None] >= jnp.arange(new.room)[None]
  logits = []
  for tokens, mask in (
    (cache, before_BS[:, None, None, None]),
    (new, causal_TS[None, None, None]),
  ):
    key_BKSH, scale_BK11S = _codes(tokens.arrays[0], query_BKGTH.dtype)
    logits_BKGTS = scale * scale_BK11S * _products(query_BKGTH, key_BKSH, wide)
    logits.append(jnp.where(mask, logits_BKGTS, jnp.finfo(wide).min))
  if columns is not None:
    logits_BTKGM = columns.logits_BTNM.reshape(
      batch, length, kv_heads, heads // kv_heads, -1
    )
    logits.append(jnp.moveaxis(logits_BTKGM, 1, 3))
  value_dtype = query_BTNH.dtype
  weights = _joint_softmax(logits)
  mixed_BKGTV = jnp.zeros((), wide)
  for weight_BKGTS, tokens in zip(weights, (cache, new)):
    value_BKSV, scale_BK11S = _codes(tokens.arrays[-1], value_dtype)
    weight_BKGTS = (scale_BK11S * weight_BKGTS).astype(value_dtype)
    mixed_BKGTV += jnp.einsum(
      "BKGTS,BKSV->BKGTV", weight_BKGTS, value_BKSV,
      preferred_element_type=wide,
    )  # fmt: skip
  if columns is not None:
    mixed_BKGTV += jnp.einsum(
      "BKGTM,BTKMV->BKGTV", weights[-1].astype(value_dtype),
      columns.value_BTKMV, preferred_element_type=wide,
    )  # fmt: skip
  mixed_BTKGV = jnp.transpose(mixed_BKGTV, (0, 3, 1, 2, 4))
  return mixed_BTKGV.reshape(batch, length, heads, -1).astype(value_dtype)


def _joint_softmax(parts):
  """The softmax over the last axes of all parts together, cut like them.

  Joined in one array, they would be copied into another layout and back, which
  takes longer than attention over a long cache.
  """
  tops = [jnp.max(part, axis=-1, keepdims=True) for part in parts]
  top = functools.reduce(jnp.maximum, tops)
  weights = [jnp.exp(part - top) for part in parts]
  sums = [jnp.sum(part, axis=-1, keepdims=True) for part in weights]
  total = functools.reduce(jnp.add, sums)
  return [part / total for part in weights]


def _products(query_BKGTH, key_BKSH, dtype):
  """Scores, without the factors that follow."""
  product = functools.partial(jnp.einsum, preferred_element_type=dtype)
  if query_BKGTH.shape[3] > 1:
    return product("BKGTH,BKSH->BKGTS", query_BKGTH, key_BKSH)
  # For one row, compilers for CPUs would transpose all keys.
  scores_BKSGT = product("BKSH,BKGTH->BKSGT", key_BKSH, query_BKGTH)
  return jnp.moveaxis(scores_BKSGT, 2, 4)


def _codes(entries, dtype):
  """Entries of a cache for a product, and what its sums are scaled by."""
  if not isinstance(entries, rounded.Rounded):
    return entries.astype(dtype), jnp.ones((), precision.wide(dtype))
  scale_BKS1 = entries.scale.astype(precision.wide(dtype))
  return entries.codes.astype(dtype), jnp.swapaxes(scale_BKS1, 2, 3)[:, :, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(kernel, tile, *arrays):
  return _forward(kernel, tile, *arrays)[0]


def _forward(kernel, tile, *arrays):
  def plain(query, key, value, segment_ids):
    mixed = _plain(tile, query, key, value, segment_ids)
    batch, length, heads, _ = query.shape
    # Its backward pass needs no normalisers.
    return mixed, jnp.zeros((batch, heads, length), jnp.float32)

  kept = _on_platform(kernel, "forward", plain, arrays)
  kept = [ad_checkpoint.checkpoint_name(x, ATTENTION) for x in kept]
  return kept[0], (*arrays, *kept)


def _backward(kernel, tile, residuals, dmixed):
  def plain(query, key, value, segment_ids, mixed, lse, dmixed):
    del mixed, lse
    attend = lambda query, key, value: _plain(
      tile, query, key, value, segment_ids
    )
    return jax.vjp(attend, query, key, value)[1](dmixed)

  arrays = *residuals, dmixed
  return *_on_platform(kernel, "backward", plain, arrays), None


_attention.defvjp(_forward, _backward)


def _on_platform(kernel, direction, plain, arrays):
  """The named kernel, or one for the platform that this is lowered for."""
  # None cannot be an operand of a switch, but a pytree may contain it.
  close = lambda function: lambda operands: function(*operands)
  if kernel == "auto":
    fused = {
      backend.platform: close(_jitted(backend, direction))
      for backend in flash.BACKENDS.values()
      if backend.why_not(*arrays[:4]) is None
    }
    if not fused:
      return plain(*arrays)
    return jax.lax.platform_dependent(arrays, default=close(plain), **fused)
  backend = flash.BACKENDS[kernel]
  name = f"model.attention_kernel={kernel!r}"
  reason = backend.why_not(*arrays[:4])
  if reason is not None:
    raise NotImplementedError(f"{name}: {reason}")
  interpret = dispatch.interpret_params()
  if interpret is not None:
    return getattr(backend, direction)(*arrays, interpret=interpret)
  arrays = dispatch.require_platform(arrays, name, backend.platform)
  return _jitted(backend, direction)(*arrays)


@functools.cache
def _jitted(backend, direction):
  """One jitted function each: equal calls are traced once."""
  return jax.jit(getattr(backend, direction))


def _plain(tile, query, key, value, segment_ids):
  if tile:
    return _tiled(tile, query, key, value, segment_ids)
  mask_BNTS = None
  if segment_ids is not None:
    mask_BNTS = _same_segment(segment_ids, segment_ids)[:, None]
  # jax itself promotes in there.
  with jax.numpy_dtype_promotion("standard"):
    return jax.nn.dot_product_attention(
      query, key, value, mask=mask_BNTS, is_causal=True
    )


def attend(
  query_BTNH: jax.Array,
  key_BSKH: jax.Array,
  value_BSKV: jax.Array,
  mask_BTS: jax.Array,
  scale: float,
  columns: Columns | None = None,
) -> jax.Array:
  """Softmax attention where the mask ([1 or B, T, S]) is true, all at once."""
  batch, length, heads, width = query_BTNH.shape
  kv_heads = key_BSKH.shape[2]
  wide = precision.wide(query_BTNH.dtype)
  query_BTKGH = jnp.reshape(
    query_BTNH, (batch, length, kv_heads, heads // kv_heads, width)
  )
  logits_BKGTS = scale * jnp.einsum(
    "BTKGH,BSKH->BKGTS", query_BTKGH, key_BSKH, preferred_element_type=wide
  )
  logits_BKGTS = jnp.where(
    mask_BTS[:, None, None], logits_BKGTS, jnp.finfo(wide).min
  )
  if columns is not None:
    shape = batch, length, kv_heads, heads // kv_heads, -1
    logits_BTKGM = jnp.reshape(columns.logits_BTNM, shape)
    logits_BKGTM = jnp.moveaxis(logits_BTKGM, 1, 3)
    logits_BKGTS = jnp.concatenate([logits_BKGTS, logits_BKGTM], axis=-1)
  weight_BKGTS = jax.nn.softmax(logits_BKGTS).astype(value_BSKV.dtype)
  own = key_BSKH.shape[1]
  mixed_BTKGV = jnp.einsum(
    "BKGTS,BSKV->BTKGV",
    weight_BKGTS[..., :own] if columns is not None else weight_BKGTS,
    value_BSKV,
    preferred_element_type=wide,
  )
  if columns is not None:
    mixed_BTKGV += jnp.einsum(
      "BKGTM,BTKMV->BTKGV",
      weight_BKGTS[..., own:],
      columns.value_BTKMV,
      preferred_element_type=wide,
    )
  return jnp.reshape(
    mixed_BTKGV.astype(value_BSKV.dtype), (batch, length, heads, -1)
  )


# Only the arguments are kept for the backward pass: tiles are checkpointed one
# by one, and the repeated keys and values are recomputed.
@functools.partial(jax.checkpoint, static_argnums=(0,))
def _tiled(
  tile, query_BTNH, key_BTKH, value_BTKV, segment_ids_BT, columns=None
):
  length = query_BTNH.shape[1]
  tile = min(tile, length)
  num_tiles = -(-length // tile)
  tiles: dict[str, Any] = dict(
    position=jnp.arange(num_tiles * tile).reshape(num_tiles, tile),
    query=_cut(query_BTNH, num_tiles, tile),
  )
  if segment_ids_BT is not None:
    tiles["segment"] = _cut(segment_ids_BT, num_tiles, tile)
  if columns is not None:
    tiles["columns"] = Columns(*(_cut(x, num_tiles, tile) for x in columns))
  # The gradients of keys and values are summed over tiles in this dtype.
  wide = precision.wide(query_BTNH.dtype)
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
    queries = jax.tree.map(lambda x, span=span: x[span], tiles)
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
    tile.get("columns"),
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
