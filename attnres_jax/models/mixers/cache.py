# SPDX-License-Identifier: Apache-2.0
"""What mixers keep of earlier tokens, while text is generated.

There are two kinds of state. A *recurrent* state (any arrays [B, ...]) is
replaced by every new token and does not grow. `Tokens` has an entry for every
token, with room for S of them; a mixer returns the entries of new tokens only,
and `append` stores those of all layers at once. So a loop over layers reads the
cache, but does not carry it.

Rows have different lengths. New tokens come as a chunk [B, T], padded on the
right: `Chunk` says where it starts and how many of its tokens count. What a row
computes does not depend on the other rows, nor on padding.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax import sharding
from attnres_jax.models import rounded


class Chunk(NamedTuple):
  """New tokens of every row.

  Attributes:
    start_B: int32, the number of tokens before them.
    length_B: int32, how many of the T new tokens count; the rest is padding.
  """

  start_B: jax.Array
  length_B: jax.Array

  def position_BT(self, length: int) -> jax.Array:
    """The positions of T tokens, with those of padding."""
    return self.start_B[:, None] + jnp.arange(length)[None]

  def counts_BT(self, length: int) -> jax.Array:
    """Which of T tokens count, bool."""
    return jnp.arange(length)[None] < self.length_B[:, None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
  """Entries of tokens, K heads of any width each.

  Attributes:
    arrays: [B, K, S, ...] in a cache, [B, K, T, ...] if they are new. The order
      is that in which products read them. In a cache they may be rounded, with
      a scale per token and head.
  """

  arrays: tuple[jax.Array | rounded.Rounded, ...]

  @property
  def room(self) -> int:
    """S, or T."""
    return self.arrays[0].shape[-2]


class Cache(NamedTuple):
  """What all mixers of a network keep of the rows of a batch.

  Attributes:
    length_B: int32, the number of tokens of each row so far.
    states: of mixers by kind, stacked like the sublayers: arrays [L, B, ...];
      of a scheme that looks back, as "residual": arrays [1, B, ...].
  """

  length_B: jax.Array
  states: dict[str, Any]


class Added(NamedTuple):
  """What a chunk adds to a `Cache`.

  Attributes:
    chunk: its tokens.
    states: `Tokens` of the new tokens, and the recurrent states after them.
  """

  chunk: Chunk
  states: dict[str, Any]


def _is_tokens(node: Any) -> bool:
  return isinstance(node, Tokens)


def map_both(tokens: Any, recurrent: Any, *caches: Any) -> Any:
  """Maps arrays of caches: `tokens` those of `Tokens`, `recurrent` others."""

  def one(first, *rest):
    function = tokens if _is_tokens(first) else recurrent
    return jax.tree.map(function, first, *rest)

  return jax.tree.map(one, *caches, is_leaf=_is_tokens)


def _zero_codes(a: jax.Array) -> rounded.Rounded:
  scale = jnp.ones((*a.shape[:-1], 1), jnp.float32)
  return rounded.Rounded(jnp.zeros(a.shape, jnp.int8), scale)


# Name -> how `Tokens` are kept: an array of zeros, of one in the model's dtype.
KEPT: dict[str, Callable[[jax.Array], jax.Array | rounded.Rounded]] = {
  "model": lambda a: a,
  "bfloat16": lambda a: a.astype(jnp.bfloat16),
  "int8": _zero_codes,
}


def kept_as(cache: Cache, name: str) -> Cache:
  """An empty cache, whose entries of tokens are kept in another dtype.

  Recurrent states stay as they are: every token changes them a little, and
  roundings would add up.

  Args:
    cache: as from `Transformer.init_cache`.
    name: a key of `KEPT`.

  Raises:
    ConfigError: it is none.
  """
  keep = config_lib.choose("cache", name, KEPT)
  states = map_both(keep, lambda a: a, cache.states)
  return cache._replace(states=states)


def is_recurrent(cache: Any) -> bool:
  """Whether some of it is no `Tokens`."""
  nodes = jax.tree.leaves(cache, is_leaf=_is_tokens)
  return not all(map(_is_tokens, nodes))


def layer(cache: Any, l: jax.Array, context: int | None = None) -> Any:
  """The cache of one layer, of those that are stacked.

  Args:
    cache: arrays [L, B, ...].
    l: which one.
    context: for how many tokens, the first ones; all by default.
  """

  def tokens(a):
    sizes = 1, *a.shape[1:3], a.shape[3] if context is None else context
    sizes = *sizes, a.shape[4]
    return jnp.squeeze(jax.lax.dynamic_slice(a, (l, 0, 0, 0, 0), sizes), 0)

  return map_both(tokens, lambda a: one_of(a, l), cache)


def one_of(stacked: Any, l: jax.Array) -> Any:
  """The l-th tree of those that are stacked."""
  return jax.tree.map(
    lambda a: jax.lax.dynamic_index_in_dim(a, l, keepdims=False), stacked
  )


def take_rows(cache: Cache, row_B: jax.Array, context: int) -> Cache:
  """Some rows, with room for `context` tokens, the first ones.

  A row that the cache does not have is the nearest one.
  """

  def take(a):
    return a.at[:, row_B].get(mode="clip")

  states = map_both(lambda a: take(a[:, :, :, :context]), take, cache.states)
  return Cache(cache.length_B.at[row_B].get(mode="clip"), states)


def append(cache: Cache, added: Added, row_B: jax.Array | None = None) -> Cache:
  """Stores a chunk.

  Args:
    cache: before it.
    added: of B rows. Tokens beyond the room of the cache are dropped.
    row_B: their rows in the cache; the same ones by default. Rows that the
      cache does not have are dropped.
  """
  chunk = added.chunk
  rows_B = jnp.arange(chunk.start_B.size) if row_B is None else row_B

  def put_rows(old, new):
    return _put_rows(old, new, chunk, row_B)

  def put(old, new):
    length, room = new.shape[3], old.shape[3]
    counts_BT = chunk.counts_BT(length)
    position_BT = jnp.where(counts_BT, chunk.position_BT(length), room)
    moved_BTLK = jnp.transpose(new.astype(old.dtype), (1, 3, 0, 2, 4))
    place = slice(None), rows_B[:, None], slice(None), position_BT
    return old.at[place].set(moved_BTLK, mode="drop")

  def replace(old, new):
    new = new.astype(old.dtype)
    return new if row_B is None else old.at[:, row_B].set(new, mode="drop")

  length_B = cache.length_B.at[rows_B].set(
    chunk.start_B + chunk.length_B, mode="drop"
  )

  def tokens(old, new):
    if isinstance(old, rounded.Rounded):
      return jax.tree.map(put_rows, old, rounded.nearest(new))
    return put_rows(old, new) if old.shape[2] == 1 else put(old, new)

  def one(old, new):
    if not _is_tokens(old):
      return jax.tree.map(replace, old, new)
    arrays = zip(old.arrays, new.arrays, strict=True)
    return Tokens(tuple(tokens(*both) for both in arrays))

  states = jax.tree.map(one, cache.states, added.states, is_leaf=_is_tokens)
  return Cache(length_B, states)


# TPU compilers scatter entries of eight bits, and those of a single head, in
# another layout than that in which products read them. They would copy the
# whole cache there and back.
def _put_rows(old, new, chunk, row_B):
  """Stores a chunk row by row, each as one update in place."""
  same_rows = row_B is None
  slot_B = jnp.arange(old.shape[1])
  row_B = slot_B if same_rows else row_B
  rows = sharding.stacked_sequences(1)
  # All shards look at all rows, unless these are where their slots are.
  of_new: Any = (rows, *[sharding.SEQUENCES] * 2)
  of_new = of_new if same_rows else sharding.WHOLE
  put = sharding.by_shards(
    _put_rows_of_shard,
    (rows, sharding.SEQUENCES, of_new),
    rows,
    sharding.ROWS,
  )
  return put(old, slot_B, (new, chunk, row_B))


def _put_rows_of_shard(old, slot_B, added):
  new, chunk, row_B = added
  row_B = row_B - slot_B[0]
  length, (layers, slots, heads, room, width) = new.shape[3], old.shape
  size = min(length, room)

  def one_row(b, old):
    # What would not fit is before the chunk then.
    start = jnp.minimum(chunk.start_B[b], room - size)
    place_T = start + jnp.arange(size) - chunk.start_B[b]
    counts_T = (place_T >= 0) & (place_T < chunk.length_B[b])
    counts_T &= (row_B[b] >= 0) & (row_B[b] < slots)
    at = 0, row_B[b], 0, start, 0
    before = jax.lax.dynamic_slice(old, at, (layers, 1, heads, size, width))
    row = jax.lax.dynamic_slice_in_dim(new, b, 1, axis=1)
    row = jnp.take(row, jnp.maximum(place_T, 0), axis=3)
    counts_T1 = jnp.expand_dims(counts_T[:, None], (0, 1, 2))
    row = jnp.where(counts_T1, row.astype(old.dtype), before)
    return jax.lax.dynamic_update_slice(old, row, at)

  return jax.lax.fori_loop(0, row_B.size, one_row, old)
