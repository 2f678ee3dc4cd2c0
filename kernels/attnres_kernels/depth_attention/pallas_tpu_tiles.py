# SPDX-License-Identifier: Apache-2.0
"""Tiles and layouts shared by both directions of depth attention on TPU.

Tokens are processed in groups of 8, the sublanes of a register. The M sources
of a group form one matrix [M*8, D] whose rows are (source, token), so that all
wide operations can be matrix products. Of a product with columns (query, token)
only the token diagonal is needed, an eighth, which is why groups are as small
as possible. Statistics are compact, [M*8, Q], and a sum over the sources of a
token is a sum over registers.
`take_columns` converts from the compact form to the diagonal if `on_diagonal`
masks the rest.

Bfloat16 operands are exact on the matrix unit. A float32 factor is split into
bfloat16 terms, three for queries and two for weights. Float32 sources use
float32 products throughout.

The width is worked on in pieces of whole registers. Several heads run one after
the other. Where slices are multiples of 128, each piece belongs to one head.
Others share pieces: a sum over columns then takes a factor that is zero outside
of the head's slice, and of results with these columns each head's are selected.
Low-rank keys are the last columns: queries are zero in front of them.
"""

from collections.abc import Callable, Iterable, Sequence
import functools
import operator
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attnres_kernels import pallas_tpu_rows as tpu_rows
from attnres_kernels import platforms

GROUP_BITS = 3
GROUP = 1 << GROUP_BITS  # The sublanes of a register.
MOST_STATISTICS = 512  # Queries times heads; beyond, programs grow too long.
_BUFFER_SHARE = 5 / 7  # Of VMEM; the rest is for values.
_PIECE = 1280  # Columns of a product.
iota, dot = tpu_rows.iota, tpu_rows.dot


def call_of(slabs: Sequence[Any], width: int, heads: int) -> tpu_rows.Call:
  """Tiles of up to 128 tokens; narrow rows need more to fill the schedule.

  With several heads half as many, as their program is longer.
  """
  tokens = (128 if width <= 1536 else 64) // (2 if heads > 1 else 1)
  return tpu_rows.Call(list(slabs), tokens, _BUFFER_SHARE)


def why_not(
  function: str, query_QD: jax.Array, sources: tuple[jax.Array, ...],
  *args: Any, heads: int = 1, **options: Any,
) -> str | None:  # fmt: skip
  """The reason why these arguments cannot run, or None."""
  num_slots, first = len(sources), sources[0]
  num_queries, width = query_QD.shape[0], first.shape[-1]
  if first.dtype not in (jnp.bfloat16, jnp.float32):
    return f"sources must be bfloat16 or float32, got {first.dtype}"
  if query_QD.dtype != jnp.float32:
    return f"queries must be float32, got {query_QD.dtype}"
  if num_queries > tpu_rows.LANES:
    return f"at most {tpu_rows.LANES} queries, got query {query_QD.shape}"
  if num_queries * heads > MOST_STATISTICS:
    return (
      f"at most {MOST_STATISTICS} softmaxes per token, got {heads=} of query"
      f" {query_QD.shape}"
    )
  slabs = num_slots + num_queries
  slabs += num_slots if function == "backward" else 0
  tile = 2 * slabs * tpu_rows.ROWS * width * first.dtype.itemsize
  if tile > platforms.tpu_vmem_bytes():
    return (
      f"query {query_QD.shape} with {num_slots} sources {first.shape} needs"
      f" {tile >> 20} MiB of VMEM for two buffers of {tpu_rows.ROWS} tokens"
    )
  return None


def cost(
  call: tpu_rows.Call, flops: int, num_queries: int, num_slots: int
) -> pl.CostEstimate:
  """`flops` are per query, source, token and column; norms come on top."""
  flops = (flops * num_queries + 2) * num_slots
  return call.cost(flops, num_queries * num_slots)


class Columns:
  """The pieces of one call.

  Attributes:
    heads: H.
    key_width: width of keys, in the mean of their squares.
    pieces: all columns, in order.
  """

  def __init__(self, width: int, heads: int, rank: int | None):
    self.heads, self.key_width = heads, rank or width
    self._front, self._slice = width - self.key_width, width // heads
    shared = heads > 1 and self._slice % tpu_rows.LANES > 0
    span = width if shared else self._slice
    size = tpu_rows.LANES if shared else _PIECE
    self.pieces = [
      slice(first, min(first + size, start + span))
      for start in range(0, width, span)
      for first in range(start, start + span, size)
    ]

  def of(self, head: int) -> list[slice]:
    """The pieces that a head's slice overlaps."""
    first, last = head * self._slice, (head + 1) * self._slice
    return [p for p in self.pieces if p.start < last and p.stop > first]

  def query_terms(self, query_QD: jax.Array, dtype: Any) -> jax.Array:
    """[terms * Q, D]: bfloat16 terms that sum to the query; one for float32."""
    query_QD = jnp.pad(query_QD, ((0, 0), (self._front, 0)))
    if dtype == jnp.float32:
      return query_QD
    terms = []
    for _ in range(3):
      # Not a cast to bfloat16 and back, which the compiler may drop.
      term = jax.lax.reduce_precision(
        query_QD, exponent_bits=8, mantissa_bits=7
      )
      terms.append(term.astype(jnp.bfloat16))
      query_QD = query_QD - term
    return jnp.concatenate(terms)

  def keys(self, piece: slice, x: jax.Array) -> jax.Array:
    """Zero in front of the key; `x` has the piece's columns."""
    if piece.start >= self._front:
      return x
    column = iota(x.shape, 1) + piece.start
    return jnp.where(column >= self._front, x, jnp.zeros_like(x))

  def owned(self, piece: slice, head: int, x: jax.Array) -> jax.Array:
    """Zero in columns of other heads."""
    first, last = head * self._slice, (head + 1) * self._slice
    if first <= piece.start and piece.stop <= last:
      return x
    column = iota(x.shape, 1) + piece.start
    mask = (column >= first) & (column < last)
    return jnp.where(mask, x, jnp.zeros_like(x))

  def select(
    self, piece: slice, of_head: Callable[[int], jax.Array]
  ) -> jax.Array:
    """Each column of a piece from the result of its head."""
    first, last = piece.start // self._slice, (piece.stop - 1) // self._slice
    chosen = of_head(first)
    for head in range(first + 1, last + 1):
      # Slices of later heads start where the last one of the piece ended.
      later = iota(chosen.shape, 1) + piece.start >= head * self._slice
      chosen = jnp.where(later, of_head(head), chosen)
    return chosen

  def inverse_rms(self, load: tpu_rows.Load, eps: float) -> jax.Array:
    """Inverse norm of the key of every source row of a group: [M*8, 1]."""
    square = 0.0
    for piece in self.pieces:
      if piece.stop > self._front:
        wide = self.keys(piece, load(piece)).astype(jnp.float32)
        square += jnp.sum(wide * wide, axis=1, keepdims=True)
    return jax.lax.rsqrt(square * (1.0 / self.key_width) + eps)


def sum_terms(products: jax.Array, count: int) -> jax.Array:
  """The sum over the terms of `query_terms`, blocks of `count` rows."""
  return total(
    products[first : first + count]
    for first in range(0, products.shape[0], count)
  )


def load_sources(
  source_refs: Any, rows: slice, valid: jax.Array | None, chunk: slice
) -> jax.Array:
  """[M*8, lanes] of one group of tokens; zero in rows that are no tokens."""
  parts = [ref[rows, chunk] for ref in source_refs]
  # A zero weight does not help against NaN in padding: 0 x NaN is NaN, and the
  # products add up the rows of all tokens of a group.
  if valid is not None:
    parts = [jnp.where(valid, part, jnp.zeros_like(part)) for part in parts]
  return jnp.concatenate(parts, axis=0)


def on_slots(x: jax.Array) -> jax.Array:
  """[M*8, Q] as [M, 8, Q], for sums over the sources of a token."""
  return x.reshape(-1, GROUP, x.shape[-1])


def pull_terms(terms: jax.Array, num_queries: int) -> jax.Array:
  """The factors of high, high and low pulls: high, low, high."""
  if terms.shape[0] == num_queries:
    return terms
  return jnp.concatenate([terms[: 2 * num_queries], terms[:num_queries]])


def take_columns(x: jax.Array, at: jax.Array) -> jax.Array:
  """x[r, at[r, i]] of float32 [R, C] and int32 [R, 128], within registers."""
  x = pad_lanes(x)
  parts = [
    jnp.take_along_axis(
      x[:, first : first + tpu_rows.LANES],
      jnp.bitwise_and(at, tpu_rows.LANES - 1),
      axis=1,
      mode="promise_in_bounds",
    )
    for first in range(0, x.shape[1], tpu_rows.LANES)
  ]
  taken = parts[0]
  for i, part in enumerate(parts[1:], 1):
    taken = jnp.where(at >= i * tpu_rows.LANES, part, taken)
  return taken


def pad_lanes(x: jax.Array) -> jax.Array:
  """Zero columns up to the next multiple of 128."""
  missing = -x.shape[1] % tpu_rows.LANES
  if not missing:
    return x
  zeros = jnp.zeros((x.shape[0], missing), x.dtype)
  return jnp.concatenate([x, zeros], axis=1)


def on_diagonal(row: jax.Array, column: jax.Array) -> jax.Array:
  """A mask: the token of the row is the token of the column."""
  return jnp.bitwise_and(row ^ column, GROUP - 1) == 0


def high_and_low(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Two float32 arrays, exact in bfloat16, whose sum is x to 16 bits."""
  high = x.astype(jnp.bfloat16).astype(jnp.float32)
  return high, x - high


def total(terms: Iterable[jax.Array]) -> jax.Array:
  return functools.reduce(operator.add, terms)
