# SPDX-License-Identifier: Apache-2.0
"""Which columns belong to which head, and which are keys, on TPU.

A kernel works on pieces of the width that are whole registers: 128 columns or
more. Where slices of heads are multiples of 128, each piece belongs to one
head. Narrower or uneven slices share pieces: a sum over columns then takes a
factor that is zero outside of the head's slice, and of results with these
columns each head's are selected. No array is transposed for it.

Per-head statistics of Q queries have J = H * Q columns, with the columns of a
head side by side. Low-rank keys are the last columns, from a multiple of 128
on, and the columns in front of the key are masked.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnres_kernels.depth_attention import pallas_tpu_tiles as tiles


class Piece(NamedTuple):
  """Some columns of the sources.

  Attributes:
    columns: of the sources, a multiple of 128 from the first on.
    heads: those whose slices overlap them.
    key: the same columns of the query terms; None if none of them is a key.
  """

  columns: slice
  heads: tuple[int, ...] = (0,)
  key: slice | None = None


class Columns:
  """The pieces of one call.

  Attributes:
    heads: H.
    width: D.
    key_width: that of keys, in the mean of their squares.
    key_start: the first column of the query terms.
    pieces: all columns, in order.
    keys: the columns of keys, in pieces as large as with one head.
    most: the most heads of a piece.
  """

  def __init__(self, width: int, lanes: int, heads: int, rank: int | None):
    self.heads, self.width = heads, width
    self.key_width = width if rank is None else rank
    self._in_front = width - self.key_width
    self.key_start = self._in_front // tiles.LANES * tiles.LANES
    self.slice_width = width // heads
    one_head = list(self._of_one_head(lanes))
    self.pieces = one_head if heads == 1 else list(self._of_heads(lanes))
    self.keys = [piece for piece in one_head if piece.key is not None]
    self.most = max(len(piece.heads) for piece in self.pieces)

  def _of_one_head(self, lanes: int) -> Iterator[Piece]:
    for part in tiles.chunks(self.key_start, lanes):
      yield Piece(part)
    for part in tiles.chunks(self.width - self.key_start, lanes):
      start = self.key_start
      yield Piece(slice(part.start + start, part.stop + start), key=part)

  def _of_heads(self, lanes: int) -> Iterator[Piece]:
    # Up to 128 columns if heads share them, else one head's.
    aligned = self.slice_width % tiles.LANES == 0
    size = min(lanes, self.slice_width) if aligned else tiles.LANES
    stops = [self.width]
    if aligned:
      stops = range(self.slice_width, self.width + 1, self.slice_width)
    start = 0
    for stop in stops:
      while start < stop:
        part = slice(start, min(start + size, stop))
        last = (part.stop - 1) // self.slice_width
        of = tuple(range(start // self.slice_width, last + 1))
        yield Piece(part, of, part)
        start = part.stop

  def separate(self, query_QD: jax.Array) -> jax.Array:
    """Queries as operand: [most * Q, key columns].

    Block i of rows is zero except for the slice of the i-th head of each piece.
    """
    front = self._in_front - self.key_start
    if front:
      query_QD = jnp.pad(query_QD, ((0, 0), (front, 0)))
    if self.most == 1:
      return query_QD
    place_D = np.concatenate(
      [
        np.arange(p.columns.start, p.columns.stop) // self.slice_width
        - p.heads[0]
        for p in self.pieces
      ]
    )
    selector = np.arange(self.most)[:, None] == place_D
    selector = jnp.asarray(selector, query_QD.dtype)
    rows = selector[:, None] * query_QD[None]
    return rows.reshape(-1, query_QD.shape[1])

  def together(self, dquery_QD: jax.Array) -> jax.Array:
    """The gradient of queries, without the columns in front of the key."""
    return dquery_QD[:, self._in_front - self.key_start :]

  def only_keys(self, piece: Piece, x: jax.Array) -> jax.Array:
    """Zero in front of the key; `x` has the piece's columns."""
    if piece.key is None or piece.columns.start >= self._in_front:
      return x
    column = tiles.iota(x.shape, 1) + piece.columns.start
    return jnp.where(column >= self._in_front, x, jnp.zeros_like(x))

  def owned(
    self, piece: Piece, head: int, shape: tuple[int, ...]
  ) -> jax.Array | None:
    """A mask of the head's columns in a piece; None if all are."""
    if len(piece.heads) == 1:
      return None
    first = head * self.slice_width - piece.columns.start
    column = tiles.iota(shape, 1)
    return (column >= first) & (column < first + self.slice_width)

  def select(
    self, piece: Piece, of_head: Callable[[int], jax.Array]
  ) -> jax.Array:
    """Each column of a piece from the result of its head."""
    first, *others = piece.heads
    chosen = of_head(first)
    for head in others:
      # Slices of later heads start where the last one of the piece ended.
      column = tiles.iota(chosen.shape, 1) + piece.columns.start
      later = column >= head * self.slice_width
      chosen = jnp.where(later, of_head(head), chosen)
    return chosen


def to_kernel(stats: jax.Array, heads: int, num_tokens: int) -> jax.Array:
  """[Q, *T] or [Q, *T, H] to [J, tokens]."""
  if heads > 1:
    stats = jnp.moveaxis(stats, -1, 0)
    return stats.reshape(heads * stats.shape[1], num_tokens)
  return stats.reshape(stats.shape[0], num_tokens)


def from_kernel(
  stats_JT: jax.Array, heads: int, shape: tuple[int, ...]
) -> jax.Array:
  """[J, tokens] to [Q, *T] or [Q, *T, H]."""
  if heads == 1:
    return stats_JT.reshape((-1,) + shape)
  return jnp.moveaxis(stats_JT.reshape((heads, -1) + shape), 0, -1)


def rows_of(x: jax.Array, index: int, count: int) -> jax.Array:
  """Block `index` of `count` rows."""
  return x[index * count : (index + 1) * count]
