# SPDX-License-Identifier: Apache-2.0
"""What mixers keep of earlier tokens, while text is generated.

There are two kinds of state. A *recurrent* state (any arrays [B, ...]) is
replaced by every new token and does not grow. `Tokens` has an entry for every
token, with room for S of them. A mixer returns only the entries of new tokens,
and `append` stores the new entries of all layers at once. So a loop over layers
reads the cache, but does not carry it.

The layers of a kind are one stack of arrays, or each has arrays of its own
(`Layers`). The latter are changed within the layer that reads them, before it
does (`Open`): a compiler that orders reads and writes by data alone then has no
reason to copy them.

Rows have different lengths. New tokens come as a chunk [B, T], padded on the
right: `Chunk` says where it starts and how many of its tokens count. What a row
computes does not depend on the other rows, nor on padding.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnres_jax.common import sharding
from attnres_jax.models import layer_stacks


class Chunk(NamedTuple):
  """New tokens of every row.

  Attributes:
    start_B: int32, the number of tokens before them.
    length_B: int32, how many of the T new tokens count; the rest is padding.
  """

  start_B: jax.Array
  length_B: jax.Array

  def position_BT(self, length: int) -> jax.Array:
    """The positions of T tokens, padding included."""
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
      is that in which products read them.
  """

  arrays: tuple[jax.Array, ...]

  @property
  def room(self) -> int:
    """S, or T."""
    return self.arrays[0].shape[-2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layers:
  """The layers of a kind in separate arrays.

  Attributes:
    trees: of each layer, a stack of one: arrays [1, B, ...].
  """

  trees: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Open:
  """The `Tokens` of one layer, which are to be changed in place.

  `opened` makes `Tokens` of it.

  Attributes:
    tokens: of all rows of the cache, arrays [B, K, S, ...].
    row_B: which rows the chunk is of; None for all.
    room: for how many tokens they are read, the first ones.
  """

  tokens: Tokens
  row_B: jax.Array | None
  room: int

  @property
  def arrays(self) -> tuple[jax.Array, ...]:
    return self.tokens.arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stored:
  """Stands for new tokens that a mixer has already stored.

  Attributes:
    tokens: of all rows of the cache.
  """

  tokens: Tokens


class Cache(NamedTuple):
  """What all mixers of a network keep of the rows of a batch.

  Attributes:
    length_B: int32, the number of tokens of each row so far.
    states: of mixers by kind, stacked like the sublayers: arrays [L, B, ...],
      or `Layers`; of a scheme that looks back, as "residual": arrays
      [1, B, ...].
  """

  length_B: jax.Array
  states: dict[str, Any]


class Added(NamedTuple):
  """Tokens and states that a chunk adds to a `Cache`.

  Attributes:
    chunk: its tokens.
    states: `Tokens` of the new tokens, or `Stored`; and the recurrent states
      after them.
  """

  chunk: Chunk
  states: dict[str, Any]


def _is_tokens(node: Any) -> bool:
  return isinstance(node, Tokens)


def map_both(tokens: Any, recurrent: Any, *caches: Any) -> Any:
  """Maps arrays of caches: of `Tokens` by `tokens`, others by `recurrent`."""

  def map_node(first, *others):
    function = tokens if _is_tokens(first) else recurrent
    return jax.tree.map(function, first, *others)

  return jax.tree.map(map_node, *caches, is_leaf=_is_tokens)


def separated(cache: Cache) -> Cache:
  """The cache with an array per layer, as `Layers`."""
  states = {
    k: Layers(layer_stacks.unstacked(state))
    for k, state in cache.states.items()
  }
  return cache._replace(states=states)


def like_layers(specs: Any, cache: Cache) -> Any:
  """`Transformer.cache_specs`, for a cache that may have `Layers`."""

  def specs_of(spec, state):
    if not isinstance(state, Layers):
      return spec
    return Layers((spec,) * len(state.trees))

  states = {
    k: specs_of(specs.states[k], state) for k, state in cache.states.items()
  }
  return specs._replace(states=states)


def layer(cache: Any, l: int, context: int | None = None) -> Any:
  """Layer l of a stack of caches, for the first `context` tokens or all."""
  if isinstance(cache, Layers):
    tree = cache.trees[l]
    if not _is_tokens(tree):
      return tree if isinstance(tree, Open) else layer_stacks.single(tree)
    room = tree.room if context is None else context
    return Open(layer_stacks.single(tree), None, room)
  return map_both(lambda a: a[l, :, :, :context], lambda a: a[l], cache)


def opened(
  cache: Tokens | Open, new: Tokens, chunk: Chunk
) -> tuple[Tokens, Tokens | Stored]:
  """The earlier tokens for a mixer to read, and what it should return.

  If the cache is open, the new tokens are already among those to read, behind
  `chunk.start_B`.
  """
  if isinstance(cache, Tokens):
    return cache, new
  stack = lambda tree: jax.tree.map(lambda a: a[None], tree)
  stored = _store(
    stack(cache.tokens), stack(new), chunk, cache.row_B, by_row=True
  )

  def read(a):
    a = a[:, :, :, : cache.room]
    return a if cache.row_B is None else a.at[:, cache.row_B].get(mode="clip")

  return layer_stacks.single(jax.tree.map(read, stored)), Stored(
    layer_stacks.single(stored)
  )


def take_rows(cache: Cache, row_B: jax.Array, context: int) -> Cache:
  """Some rows, with room for `context` tokens, the first ones.

  A row that the cache does not have is the nearest one. Tokens of `Layers`
  become `Open`, and `append` is to be called with the same rows.
  """

  def take(a):
    return a.at[:, row_B].get(mode="clip")

  def of_layer(tree):
    if _is_tokens(tree):
      return Open(layer_stacks.single(tree), row_B, context)
    return jax.tree.map(take, tree)

  def of_kind(state):
    if isinstance(state, Layers):
      return Layers(tuple(map(of_layer, state.trees)))
    return map_both(lambda a: take(a[:, :, :, :context]), take, state)

  states = {kind: of_kind(state) for kind, state in cache.states.items()}
  return Cache(cache.length_B.at[row_B].get(mode="clip"), states)


def append(cache: Cache, added: Added, row_B: jax.Array | None = None) -> Cache:
  """Stores a chunk in the rows `row_B`, by default the same ones.

  Rows that the cache does not have are dropped, as are tokens beyond its room.
  """
  chunk = added.chunk
  rows_B = jnp.arange(chunk.start_B.size) if row_B is None else row_B

  def replace(old, new):
    new = new.astype(old.dtype)
    return new if row_B is None else old.at[:, row_B].set(new, mode="drop")

  length_B = cache.length_B.at[rows_B].set(
    chunk.start_B + chunk.length_B, mode="drop"
  )

  def store(old, new):
    if isinstance(new, Stored):
      return new.tokens
    if not _is_tokens(old):
      return jax.tree.map(replace, old, new)
    return _store(old, new, chunk, row_B)

  states = jax.tree.map(store, cache.states, added.states, is_leaf=_is_tokens)
  return Cache(length_B, states)


def _store(
  old: Tokens, new: Tokens, chunk: Chunk, row_B: jax.Array | None,
  by_row: bool = False,
) -> Tokens:  # fmt: skip
  """Stores new tokens in stacked layers, as in `append`.

  With `by_row`, in a loop over rows that is not unrolled even for one row, so
  that compilers change the cache in place before they read it.
  """

  def put_rows(old, new):
    return _put_rows(old, new, chunk, row_B, by_row)

  def put(old, new):
    if by_row or old.shape[2] == 1:
      return put_rows(old, new)
    return _put(old, new, chunk, row_B)

  return Tokens(
    tuple(put(*pair) for pair in zip(old.arrays, new.arrays, strict=True))
  )


def _put(
  old: jax.Array, new: jax.Array, chunk: Chunk, row_B: jax.Array | None
) -> jax.Array:
  """Stores a chunk, of all rows at once."""
  rows_B = jnp.arange(chunk.start_B.size) if row_B is None else row_B
  length, room = new.shape[3], old.shape[3]
  counts_BT = chunk.counts_BT(length)
  position_BT = jnp.where(counts_BT, chunk.position_BT(length), room)
  moved_BTLK = jnp.transpose(new.astype(old.dtype), (1, 3, 0, 2, 4))
  place = slice(None), rows_B[:, None], slice(None), position_BT
  return old.at[place].set(moved_BTLK, mode="drop")


# TPU compilers scatter entries of a single head in another
# layout than that in which products read them. They would copy the
# whole cache there and back.
def _put_rows(
  old: jax.Array, new: jax.Array, chunk: Chunk, row_B: jax.Array | None,
  stays_loop: bool = False,
) -> jax.Array:  # fmt: skip
  """Stores a chunk row by row, each as one update in place."""
  same_rows = row_B is None
  slot_B = jnp.arange(old.shape[1])
  row_B = slot_B if same_rows else row_B
  rows = sharding.stacked_sequences(1)
  # All shards look at all rows, unless these are where their slots are.
  of_new: Any = (rows, *[sharding.SEQUENCES] * 2)
  of_new = of_new if same_rows else sharding.WHOLE
  put = sharding.by_shards(
    functools.partial(_put_rows_of_shard, stays_loop),
    (rows, sharding.SEQUENCES, of_new),
    rows,
    sharding.ROWS,
  )
  return put(old, slot_B, (new, chunk, row_B))


def _put_rows_of_shard(
  stays_loop: bool, old: jax.Array, slot_B: jax.Array, added: tuple[Any, ...]
) -> jax.Array:
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

  end: Any = row_B.size
  if stays_loop:  # Its end is data: the last row with tokens.
    has_tokens_B = (chunk.length_B > 0) & (chunk.start_B < room)
    end = jnp.max(jnp.where(has_tokens_B, jnp.arange(1, end + 1), 0))
  return jax.lax.fori_loop(0, end, one_row, old)
