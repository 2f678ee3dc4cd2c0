# SPDX-License-Identifier: Apache-2.0
"""What the backward pass of several heads does otherwise, on TPU.

With one head, compact statistics are gathered out of products and into factors
column by column. With H heads there are H times as many, so both ways are
shorter here. Products have rows (head, query, token), of which the diagonal is
summed over the rows of registers. The terms of all heads are packed before they
are spread, so that a factor takes one gather.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels.depth_attention import pallas_tpu_columns as columns_lib
from attnres_kernels.depth_attention import pallas_tpu_tiles as tiles


def products(
  load: Callable[[slice], jax.Array], douts: Callable[[slice], jax.Array],
  terms_ref: Any, columns: columns_lib.Columns, num_slots: int,
  num_queries: int, exact: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
  """Products of source rows with their token's dout and the query: [M*8, J]."""
  del num_slots  # Of one head.
  diagonal = num_queries * tiles.GROUP
  of_douts: list[Any] = [0.0] * columns.heads
  of_queries: list[Any] = [0.0] * columns.heads
  for piece in columns.pieces:
    dout, source = douts(piece.columns), load(piece.columns)
    rows = [
      tiles.where(
        columns.owned(piece, head, dout.shape), dout, jnp.zeros_like(dout)
      )
      for head in piece.heads
    ]
    partner = jnp.concatenate([*rows, terms_ref[:, piece.key]], axis=0)
    rows_product = tiles.dot(partner, source, 1, exact=exact)
    of_query = tiles.sum_terms(
      rows_product[len(rows) * diagonal :], columns.most * num_queries
    )
    for i, head in enumerate(piece.heads):
      of_douts[head] += columns_lib.rows_of(rows_product, i, diagonal)
      of_queries[head] += columns_lib.rows_of(of_query, i, num_queries)
  product = _token_diagonal(jnp.concatenate(of_douts, axis=0))
  score = jnp.concatenate(of_queries, axis=0)
  return jnp.transpose(product), jnp.transpose(score)


def _token_diagonal(x: jax.Array) -> jax.Array:
  """x[j * 8 + token(c), c]: [J*8, M*8] to [J, M*8]."""
  count, lanes = x.shape[0] // tiles.GROUP, x.shape[1]
  x = x.reshape(count, tiles.GROUP, lanes)
  row, column = (tiles.iota((1, tiles.GROUP, lanes), axis) for axis in (1, 2))
  x = jnp.where(tiles.on_diagonal(row, column), x, 0.0)
  missing = -count % tiles.GROUP
  if missing:
    x = jnp.concatenate([x, jnp.zeros((missing, *x.shape[1:]), x.dtype)])
  # Two registers at a time become one, whose rows are sums of half as many rows
  # of the one and of the other in turn. Row j of a result is then register j.
  for step in (1, 2, 4):
    pairs = x.reshape(-1, 2, tiles.GROUP, lanes)
    first, second = pairs[:, 0], pairs[:, 1]
    is_first = jnp.bitwise_and(row, step) == 0
    rest = jnp.where(is_first, second, first)
    rest = pltpu.roll(rest, tiles.GROUP - step, 1)
    x = jnp.where(is_first, first, second) + rest
  return x.reshape(-1, lanes)[:count]


class Factors:
  """Left operands of the source gradients, one per head [M*8, columns].

  Columns are as with one head: the weights on the token diagonal (high terms,
  low terms), then the pulls (high, high, low). Exact factors need one term.
  Before, the terms of each head are put side by side: weights (high, low),
  pulls (high, low), of as many heads as fit into a register.
  """

  def __init__(self, rows: int, num_queries: int, heads: int, exact: bool):
    self._queries, self._heads, self._exact = num_queries, heads, exact
    self._kinds = 2 if exact else 4
    self._size = self._kinds * num_queries
    self._per = max(1, tiles.LANES // self._size)
    self._lane = tiles.iota((rows, tiles.LANES), 1)
    self._row = tiles.iota((rows, tiles.LANES), 0)
    inside, self._place = self._lane, jnp.zeros_like(self._lane)
    for _ in range(1, self._per):
      beyond = inside >= self._size
      inside = jnp.where(beyond, inside - self._size, inside)
      self._place = jnp.where(beyond, self._place + 1, self._place)
    self._inside = inside
    diagonal = num_queries * tiles.GROUP
    self._spread = diagonal if exact else 2 * diagonal
    self.columns = self._spread + num_queries * (1 if exact else 3)
    self._parts = [
      self._part(first) for first in range(0, self.columns, tiles.LANES)
    ]

  def _part(self, first: int) -> tuple[jax.Array, jax.Array]:
    """Of 128 columns: the columns of the terms, and which are not zero."""
    queries, column = self._queries, self._lane + first
    valid = (column >= self._spread) | tiles.on_diagonal(self._row, column)
    # Weights: the low terms of queries follow the high ones, as in the terms.
    of_weight = column >> tiles.GROUP_BITS
    pull = column - self._spread
    if not self._exact:
      pull = jnp.where(pull >= queries, pull - queries, pull)
    of_pull = pull + (1 if self._exact else 2) * queries
    return jnp.where(column < self._spread, of_weight, of_pull), valid

  def __call__(self, weight: jax.Array, pull: jax.Array) -> list[jax.Array]:
    """The factors of weights and pulls [M*8, J]."""
    parts = [weight, pull]
    if not self._exact:
      parts = [*tiles.high_and_low(weight), *tiles.high_and_low(pull)]
    if self._size > tiles.LANES:
      packed = [
        jnp.concatenate(
          [p[:, h * self._queries : (h + 1) * self._queries] for p in parts],
          axis=1,
        )
        for h in range(self._heads)
      ]
    else:
      packed = [
        self._pack(parts, first) for first in range(0, self._heads, self._per)
      ]
    return [
      self._factor(packed[head // self._per], head % self._per * self._size)
      for head in range(self._heads)
    ]

  def _pack(self, parts: list[jax.Array], first_head: int) -> jax.Array:
    first = first_head * self._queries
    start = first // tiles.LANES * tiles.LANES
    stop = min(first + self._per * self._queries, parts[0].shape[1])
    column = self._place * self._queries + self._inside + (first - start)
    result: Any = None
    for kind, part in enumerate(parts):
      before = kind * self._queries
      taken = tiles.take_columns(
        part[:, start:stop], lambda r, i, b=before: column - b
      )
      if result is not None:
        taken = jnp.where(self._inside >= before, taken, result)
      result = taken
    return result

  def _factor(self, packed: jax.Array, first: int) -> jax.Array:
    parts = []
    for at, valid in self._parts:
      taken = tiles.take_columns(packed, lambda r, i, at=at: at + first)
      part = jnp.where(valid, taken, 0.0)
      parts.append(part if self._exact else part.astype(jnp.bfloat16))
    return jnp.concatenate(parts, axis=1)[:, : self.columns]
