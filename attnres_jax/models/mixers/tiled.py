# SPDX-License-Identifier: Apache-2.0
"""Causal softmax attention in plain JAX, tile by tile.

A tile of queries attends to the keys before its end, so that the half of all
pairs which causality excludes is mostly not computed, and memory is linear in
the number of tokens T. As in FlashAttention (arXiv:2205.14135, section 3.1),
the backward pass computes the weights of a tile again from the log-normalisers
of the forward pass, and needs no sums over pairs of tokens but products: the
sum that the gradient of a softmax subtracts is <output, its gradient>.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from attnres_jax import precision

T = TypeVar("T")
U = TypeVar("U")

# Queries per tile: products large enough for a matrix unit, and never all
# pairs of a long sequence at once.
TILE = 512
# Smaller tiles save fewer pairs than their products lose.
_SMALLEST = 64
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


class _Keys(NamedTuple):
  """What the queries of a span attend to."""

  key_BSKH: jax.Array
  value_BSKV: jax.Array
  segment_BS: jax.Array | None


class _Tile(NamedTuple):
  """Queries, and what belongs to them: [B, C, ...], heads as [K, G]."""

  position_1C: jax.Array
  query_BCKGH: jax.Array
  segment_BC: jax.Array | None
  logits_BCKGM: jax.Array | None
  value_BCKMV: jax.Array | None


def forward(
  query_BTNH: jax.Array,
  key_BTKH: jax.Array,
  value_BTKV: jax.Array,
  segment_ids_BT: jax.Array | None = None,
  columns: Columns | None = None,
  *,
  tile: int = 0,
) -> tuple[jax.Array, jax.Array]:
  """Attends to positions s <= t, within a document if segment ids are given.

  Args:
    query_BTNH: queries of N heads.
    key_BTKH: keys of K heads, a divisor of N.
    value_BTKV: values, of any width V.
    segment_ids_BT: document numbers of packed rows.
    columns: what else each query attends to.
    tile: queries per tile; 0 chooses by T.

  Returns:
    [B, T, N, V] in the dtype of the values, and log-normalisers [B, N, T] in
    the dtype of sums.
  """
  keys = _Keys(key_BTKH, value_BTKV, segment_ids_BT)
  tiles = _tiles(query_BTNH, key_BTKH.shape[2], segment_ids_BT, columns)
  parts = [
    by_tiles(lambda own, keys=_before(keys, stop): _mix(own, keys), own, size)
    for own, stop, size in _spans(tiles, tile)
  ]
  mixed_BTKGV, lse_BTKG = jax.tree.map(lambda *x: _join(x), *parts)
  lse_BTN = jax.lax.collapse(lse_BTKG, 2, 4)
  return jax.lax.collapse(mixed_BTKGV, 2, 4), jnp.swapaxes(lse_BTN, 1, 2)


def backward(
  query_BTNH: jax.Array,
  key_BTKH: jax.Array,
  value_BTKV: jax.Array,
  segment_ids_BT: jax.Array | None,
  columns: Columns | None,
  mixed_BTNV: jax.Array,
  lse_BNT: jax.Array,
  dmixed_BTNV: jax.Array,
  *,
  tile: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array, Columns | None]:
  """The gradients of queries, keys, values and columns.

  Args:
    query_BTNH: as in `forward`; so are the next four.
    key_BTKH: likewise.
    value_BTKV: likewise.
    segment_ids_BT: likewise.
    columns: likewise.
    mixed_BTNV: what `forward` returned.
    lse_BNT: likewise.
    dmixed_BTNV: the gradient of `mixed_BTNV`.
    tile: as in `forward`.
  """
  kv_heads = key_BTKH.shape[2]
  keys = _Keys(key_BTKH, value_BTKV, segment_ids_BT)
  wide = precision.wide(query_BTNH.dtype)
  minus_BTN = jnp.sum(
    precision.widen(mixed_BTNV) * precision.widen(dmixed_BTNV), axis=-1
  )
  given = [jnp.swapaxes(lse_BNT, 1, 2), minus_BTN, dmixed_BTNV]
  tiles = (
    _tiles(query_BTNH, kv_heads, segment_ids_BT, columns),
    *(_grouped(x, kv_heads) for x in given),
  )
  # Sums over tiles, in a wide dtype.
  dkey_BTKH = jnp.zeros(key_BTKH.shape, wide)
  dvalue_BTKV = jnp.zeros(value_BTKV.shape, wide)
  parts = []
  for own, stop, size in _spans(tiles, tile):
    before = _before(keys, stop)
    added, part = _sum_by_tiles(
      lambda own, before=before: _pull(own, before), own, size
    )
    dkey_BTKH = dkey_BTKH.at[:, :stop].add(added[0])
    dvalue_BTKV = dvalue_BTKV.at[:, :stop].add(added[1])
    parts.append(part)
  dquery_BTKGH, dcolumns = jax.tree.map(lambda *x: _join(x), *parts)
  if columns is not None:
    dlogits_BTKGM, dvalue_BTKMV = dcolumns
    dcolumns = Columns(jax.lax.collapse(dlogits_BTKGM, 2, 4), dvalue_BTKMV)
  return (
    jax.lax.collapse(dquery_BTKGH, 2, 4),
    dkey_BTKH.astype(key_BTKH.dtype),
    dvalue_BTKV.astype(value_BTKV.dtype),
    dcolumns,
  )


def _mix(tile: _Tile, keys: _Keys) -> tuple[jax.Array, jax.Array]:
  """The outputs of a tile [B, C, K, G, V] and its normalisers [B, C, K, G]."""
  logits_BKGCS, extra_BKGCM = _logits(tile, keys)
  top_BKGC1 = jnp.max(logits_BKGCS, axis=-1, keepdims=True)
  if extra_BKGCM is not None:
    extra_top = jnp.max(extra_BKGCM, axis=-1, keepdims=True)
    top_BKGC1 = jnp.maximum(top_BKGC1, extra_top)
  weight_BKGCS = jnp.exp(logits_BKGCS - top_BKGC1)
  total_BKGC1 = jnp.sum(weight_BKGCS, axis=-1, keepdims=True)
  value_BSKV = keys.value_BSKV
  product = _product(precision.wide(value_BSKV.dtype))
  mixed_BKGCV = product(
    "BKGCS,BSKV->BKGCV", weight_BKGCS.astype(value_BSKV.dtype), value_BSKV
  )
  if extra_BKGCM is not None:
    weight_BKGCM = jnp.exp(extra_BKGCM - top_BKGC1)
    total_BKGC1 += jnp.sum(weight_BKGCM, axis=-1, keepdims=True)
    mixed_BKGCV += product(
      "BKGCM,BCKMV->BKGCV", weight_BKGCM.astype(value_BSKV.dtype),
      tile.value_BCKMV,
    )  # fmt: skip
  mixed_BKGCV = (mixed_BKGCV / total_BKGC1).astype(value_BSKV.dtype)
  lse_BKGC = (top_BKGC1 + jnp.log(total_BKGC1))[..., 0]
  return jnp.moveaxis(mixed_BKGCV, 3, 1), jnp.moveaxis(lse_BKGC, 3, 1)


def _pull(
  own: tuple[_Tile, jax.Array, jax.Array, jax.Array], keys: _Keys
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, Any]]:
  """What a tile adds to the gradients of keys and values, and its own."""
  tile, lse_BCKG, minus_BCKG, dmixed_BCKGV = own
  dtype = tile.query_BCKGH.dtype
  product = _product(precision.wide(dtype))
  column = lambda x_BCKG: jnp.moveaxis(x_BCKG, 1, 3)[..., None]
  lse_BKGC1, minus_BKGC1 = column(lse_BCKG), column(minus_BCKG)
  logits_BKGCS, extra_BKGCM = _logits(tile, keys)
  weight_BKGCS = jnp.exp(logits_BKGCS - lse_BKGC1)
  dweight_BKGCS = product("BCKGV,BSKV->BKGCS", dmixed_BCKGV, keys.value_BSKV)
  dlogits_BKGCS = weight_BKGCS * (dweight_BKGCS - minus_BKGC1)
  dlogits_BKGCS = (_scale(tile) * dlogits_BKGCS).astype(dtype)
  dvalue_BSKV = product(
    "BKGCS,BCKGV->BSKV", weight_BKGCS.astype(dtype), dmixed_BCKGV
  )
  dkey_BSKH = product("BKGCS,BCKGH->BSKH", dlogits_BKGCS, tile.query_BCKGH)
  dquery_BCKGH = product("BKGCS,BSKH->BCKGH", dlogits_BKGCS, keys.key_BSKH)
  dcolumns = None
  if extra_BKGCM is not None:
    assert tile.logits_BCKGM is not None and tile.value_BCKMV is not None
    weight_BKGCM = jnp.exp(extra_BKGCM - lse_BKGC1)
    dweight_BKGCM = product(
      "BCKGV,BCKMV->BKGCM", dmixed_BCKGV, tile.value_BCKMV
    )
    dlogits_BKGCM = weight_BKGCM * (dweight_BKGCM - minus_BKGC1)
    dvalue_BCKMV = product(
      "BKGCM,BCKGV->BCKMV", weight_BKGCM.astype(dtype), dmixed_BCKGV
    )
    dcolumns = (
      jnp.moveaxis(dlogits_BKGCM, 3, 1).astype(tile.logits_BCKGM.dtype),
      dvalue_BCKMV.astype(tile.value_BCKMV.dtype),
    )
  return (dkey_BSKH, dvalue_BSKV), (dquery_BCKGH.astype(dtype), dcolumns)


def _logits(tile: _Tile, keys: _Keys) -> tuple[jax.Array, jax.Array | None]:
  """Scaled scores of keys, the lowest number where hidden, and of columns."""
  wide = precision.wide(tile.query_BCKGH.dtype)
  logits_BKGCS = _scale(tile) * _product(wide)(
    "BCKGH,BSKH->BKGCS", tile.query_BCKGH, keys.key_BSKH
  )
  position_S = jnp.arange(keys.key_BSKH.shape[1])
  seen_BCS = tile.position_1C[:, :, None] >= position_S[None, None]
  if keys.segment_BS is not None and tile.segment_BC is not None:
    seen_BCS &= tile.segment_BC[:, :, None] == keys.segment_BS[:, None]
  seen_B11CS = seen_BCS[:, None, None]
  logits_BKGCS = jnp.where(seen_B11CS, logits_BKGCS, jnp.finfo(wide).min)
  if tile.logits_BCKGM is None:
    return logits_BKGCS, None
  return logits_BKGCS, jnp.moveaxis(tile.logits_BCKGM, 1, 3).astype(wide)


def _scale(tile: _Tile) -> float:
  return tile.query_BCKGH.shape[-1] ** -0.5


def _product(dtype):
  return lambda spec, *arrays: jnp.einsum(
    spec, *arrays, preferred_element_type=dtype
  )


def _tiles(query_BTNH, kv_heads, segment_ids_BT, columns) -> _Tile:
  """All queries as one tile."""
  return _Tile(
    jnp.arange(query_BTNH.shape[1])[None],
    _grouped(query_BTNH, kv_heads),
    segment_ids_BT,
    None if columns is None else _grouped(columns.logits_BTNM, kv_heads),
    None if columns is None else columns.value_BTKMV,
  )


def _grouped(x_BTN: jax.Array, kv_heads: int) -> jax.Array:
  """[B, T, N, ...] as [B, T, K, G, ...]."""
  batch, length, heads, *rest = x_BTN.shape
  return x_BTN.reshape(batch, length, kv_heads, heads // kv_heads, *rest)


def _spans(tiles: Any, tile: int):
  """Cuts [B, T, ...]: the part of a span, where it stops, and its tile."""
  length = jax.tree.leaves(tiles)[0].shape[1]
  tile = tile or min(TILE, max(_SMALLEST, -(-length // _SPANS)))
  num_tiles = -(-length // tile)
  step = tile * -(-num_tiles // _SPANS)
  for start in range(0, length, step):
    stop = min(start + step, length)
    own = jax.tree.map(
      functools.partial(
        jax.lax.slice_in_dim, start_index=start, limit_index=stop, axis=1
      ),
      tiles,
    )
    yield own, stop, tile


def _before(keys: _Keys, stop: int) -> _Keys:
  return jax.tree.map(lambda x: x[:, :stop], keys)


def by_tiles(function: Callable[[T], U], own: T, tile: int) -> U:
  """Applies a function of a tile to all tiles of [B, T, ...], one by one.

  Args:
    function: of arrays [B, C, ...], C <= tile, to arrays [B, C, ...].
    own: arrays [B, T, ...]; the last tile is padded with zeros.
    tile: the most queries of a tile.
  """
  if jax.tree.leaves(own)[0].shape[1] <= tile:
    return function(own)
  return _stacked(jax.lax.map(function, _cut(own, tile)), own)


def _sum_by_tiles(function, own, tile):
  """`by_tiles` of a function of which the first of two outputs is added up."""
  if jax.tree.leaves(own)[0].shape[1] <= tile:
    return function(own)
  cut = _cut(own, tile)
  shapes, _ = jax.eval_shape(function, jax.tree.map(lambda x: x[0], cut))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

  def step(total, one):
    added, out = function(one)
    return jax.tree.map(jnp.add, total, added), out

  total, outs = jax.lax.scan(step, zeros, cut)
  return total, _stacked(outs, own)


def _cut(own, tile):
  """[B, T, ...] into tiles [X, B, C, ...]; the last one is padded with zeros.

  A query of zeros has finite weights, and its gradients vanish as what it is
  given is zero.
  """
  length = jax.tree.leaves(own)[0].shape[1]
  num_tiles = -(-length // tile)

  def one(x_BT):
    missing = num_tiles * tile - length
    padding = ((0, 0), (0, missing)) + ((0, 0),) * (x_BT.ndim - 2)
    x_BT = jnp.pad(x_BT, padding)
    shape = (x_BT.shape[0], num_tiles, tile, *x_BT.shape[2:])
    return jnp.moveaxis(x_BT.reshape(shape), 1, 0)

  return jax.tree.map(one, own)


def _stacked(outs, own):
  """The inverse of `_cut`."""
  length = jax.tree.leaves(own)[0].shape[1]

  def one(x_XBC):
    return jax.lax.collapse(jnp.moveaxis(x_XBC, 0, 1), 1, 3)[:, :length]

  return jax.tree.map(one, outs)


def _join(parts: Sequence[jax.Array]) -> jax.Array:
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
