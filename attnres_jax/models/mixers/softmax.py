# SPDX-License-Identifier: Apache-2.0
"""Causal softmax attention over projected heads.

In tiles of plain JAX (`tiled`); if the program is lowered for a platform with a
fused kernel that supports the arguments, that kernel is used instead (`flash`).
All of them keep the output and the log-normalisers for the backward pass, by a
name for activation checkpointing.
"""

import functools
import math

import jax
from jax import ad_checkpoint
import jax.numpy as jnp

from attnres_jax import precision
from attnres_jax import sharding
from attnres_jax.models import linear
from attnres_jax.models.mixers import cache as cache_lib
from attnres_jax.models.mixers import flash
from attnres_jax.models.mixers import tiled
from attnres_kernels import dispatch

# The name by which activation checkpointing recognises the outputs of attention
# and their log-normalisers.
ATTENTION = "attention"

Columns = tiled.Columns


def causal_attention(
  query_BTNH: jax.Array,
  key_BTKH: jax.Array,
  value_BTKV: jax.Array,
  segment_ids_BT: jax.Array | None = None,
  *,
  kernel: str = "auto",
  tile: int = 0,
  columns: Columns | None = None,
) -> jax.Array:
  """Attends to positions s <= t, within a document if segment ids are given.

  Args:
    query_BTNH: queries of N heads.
    key_BTKH: keys of K heads, a divisor of N; scores are q . k / sqrt(H).
    value_BTKV: values, of any width V.
    segment_ids_BT: document numbers of packed rows.
    kernel: a value of `model.attention_kernel`.
    tile: queries per tile without a kernel; does not change the function. 0
      chooses by T.
    columns: what else each query attends to; no fused kernel has these.

  Returns:
    [B, T, N, V] in the dtype of the values; the softmax is in float32.

  Raises:
    NotImplementedError: the named kernel does not take these arguments, or
      (when the program is lowered) does not run on that platform.
  """
  arrays = query_BTNH, key_BTKH, value_BTKV, segment_ids_BT
  specs = *[sharding.HEADS] * 3, sharding.SEQUENCES
  *tokens_and_heads, width = query_BTNH.shape
  num_queries, value_width = math.prod(tokens_and_heads), value_BTKV.shape[-1]
  # Causal: half of all pairs count, even if a kernel computes more.
  pairs = num_queries * query_BTNH.shape[1] / 2
  flops = 2 * pairs * (width + value_width)
  if columns is not None:
    kernel = "tiled"
    arrays, specs = (*arrays, columns), (*specs, sharding.HEADS)
    flops += 2 * columns.logits_BTNM.size * value_width
  attention = functools.partial(_attention, kernel, tile)
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
      query_BTNH, key_BTKH, value_BTKV, kernel=kernel, columns=columns
    ), added
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

  More queries than `tiled.TILE` are in tiles of so many: the scores of a long
  chunk over a long cache would not fit.

  Args:
    query_BTNH: of the new tokens.
    cache: keys and values, or one array that is both.
    new: the same of the new tokens.
    chunk: the new tokens.
    scale: of the scores.
    columns: what else each query attends to.
  """
  length = query_BTNH.shape[1]
  one_tile = functools.partial(_after, cache, new, chunk, scale)
  own = query_BTNH, jnp.arange(length)[None], columns
  return tiled.by_tiles(one_tile, own, tiled.TILE)


def _after(cache, new, chunk, scale, tile):
  """`attend_after` of some of the queries, by their places in the chunk."""
  query_BTNH, position_1T, columns = tile
  batch, length, heads, width = query_BTNH.shape
  kv_heads = new.arrays[0].shape[1]
  wide = precision.wide(query_BTNH.dtype)
  query_BKGTH = jnp.transpose(
    query_BTNH.reshape(batch, length, kv_heads, -1, width), (0, 2, 3, 1, 4)
  )
  before_BS = jnp.arange(cache.room)[None] < chunk.start_B[:, None]
  causal_TS = position_1T[0][:, None] >= jnp.arange(new.room)[None]
  logits = []
  for tokens, mask in (
    (cache, before_BS[:, None, None, None]),
    (new, causal_TS[None, None, None]),
  ):
    key_BKSH = tokens.arrays[0].astype(query_BKGTH.dtype)
    logits_BKGTS = scale * _products(query_BKGTH, key_BKSH, wide)
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
    mixed_BKGTV += jnp.einsum(
      "BKGTS,BKSV->BKGTV", weight_BKGTS.astype(value_dtype),
      tokens.arrays[-1].astype(value_dtype), preferred_element_type=wide,
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(kernel, tile, *arrays):
  return _forward(kernel, tile, *arrays)[0]


def _forward(kernel, tile, *arrays):
  plain = functools.partial(tiled.forward, tile=tile)
  kept = _on_platform(kernel, "forward", plain, arrays)
  kept = [ad_checkpoint.checkpoint_name(x, ATTENTION) for x in kept]
  return kept[0], (arrays, kept)


def _backward(kernel, tile, residuals, dmixed):
  (query, key, value, segment_ids, *columns), kept = residuals

  def plain(query, key, value, segment_ids, *kept):
    arrays = query, key, value, segment_ids, *(columns or [None])
    *gradients, dcolumns = tiled.backward(*arrays, *kept, tile=tile)
    return *gradients, *([dcolumns] * len(columns))

  arrays = query, key, value, segment_ids, *kept, dmixed
  dquery, dkey, dvalue, *dcolumns = _on_platform(
    kernel, "backward", plain, arrays
  )
  return dquery, dkey, dvalue, None, *dcolumns


_attention.defvjp(_forward, _backward)


def _on_platform(kernel, direction, plain, arrays):
  """The named kernel, or one for the platform that this is lowered for."""
  if kernel == "tiled":
    return plain(*arrays)
  if kernel == "auto":
    fused = {
      backend.platform: _jitted(backend, direction)
      for backend in flash.BACKENDS.values()
      if backend.why_not(*arrays[:4]) is None
    }
    return dispatch.by_platform(arrays, plain, **fused)
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
