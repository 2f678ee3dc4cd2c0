# SPDX-License-Identifier: Apache-2.0
"""Tiles and layouts shared by both directions of depth attention on TPU.

Tokens are processed in groups of 8, the sublanes of a register. The M sources
of a group form one matrix [M*8, D] whose rows are (source, token), so that all
wide operations can be matrix products. Of a product with columns (query, token)
only the token diagonal is needed, an eighth, which is why groups are as small
as possible. Statistics are compact, [M*8, Q], and a sum over the sources of a
token is a sum over registers.
`take_columns` converts from the diagonal to the compact form, and back if
`on_diagonal` masks the rest.

Bfloat16 operands are exact on the matrix unit. A float32 factor is split into
bfloat16 terms, three for queries and two for weights. Float32 sources use
float32 products throughout.
"""

from collections.abc import Callable, Iterable
import dataclasses
import functools
import operator
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attnres_kernels import dispatch

GROUP_BITS = 3
GROUP = 1 << GROUP_BITS  # The sublanes of a register.
ROWS = 16  # The row tile of bfloat16 in memory.
LANES = 128  # Of a register, and the most queries.
MOST_STATISTICS = 512  # Queries times heads; beyond, programs grow too long.
_BUFFER_SHARE = 5 / 7  # Of VMEM; the rest is for values.


@dataclasses.dataclass(frozen=True)
class BlockSizes:
  """Tokens per grid step, and lanes per inner product step."""

  tokens: int
  lanes: int = 1280

  @classmethod
  def choose(
    cls, num_tokens: int, width: int, token_bytes: int, heads: int = 1
  ) -> "BlockSizes":
    """The largest tile up to 128 tokens whose two buffers stay small.

    Args:
      num_tokens: all tokens of the call.
      width: D.
      token_bytes: bytes moved per token.
      heads: with several, half as many tokens, as their program is longer.
    """
    # Narrow rows need larger tiles to fill the schedule.
    tokens = 128 if width <= 1536 else 64
    if heads > 1:
      tokens //= 2
    most = _BUFFER_SHARE * dispatch.tpu_vmem_bytes()
    while tokens > ROWS and (
      2 * tokens * token_bytes > most or tokens // 2 >= num_tokens
    ):
      tokens //= 2
    return cls(tokens)


def why_not(
  function: str, query_QD: jax.Array, sources: tuple[jax.Array, ...],
  *args: Any, eps: float, heads: int = 1, rank: int | None = None,
) -> str | None:  # fmt: skip
  """The reason why these arguments cannot run, or None."""
  del args, eps, rank
  num_slots, first = len(sources), sources[0]
  num_queries, width = query_QD.shape[0], first.shape[-1]
  if first.dtype not in (jnp.bfloat16, jnp.float32):
    return f"sources must be bfloat16 or float32, got {first.dtype}"
  if query_QD.dtype != jnp.float32:
    return f"queries must be float32, got {query_QD.dtype}"
  if num_queries > LANES:
    return f"at most {LANES} queries, got query {query_QD.shape}"
  if num_queries * heads > MOST_STATISTICS:
    return (
      f"at most {MOST_STATISTICS} softmaxes per token, got {heads=} of query"
      f" {query_QD.shape}"
    )
  slabs = num_slots + num_queries
  slabs += num_slots if function == "backward" else 0
  tile = 2 * slabs * ROWS * width * first.dtype.itemsize
  if tile > dispatch.tpu_vmem_bytes():
    return (
      f"query {query_QD.shape} with {num_slots} sources {first.shape} needs"
      f" {tile >> 20} MiB of VMEM for two buffers of {ROWS} tokens"
    )
  return None


def cost(
  flops: int, num_queries: int, num_slots: int, num_tokens: int, width: int,
  token_bytes: int,
) -> pl.CostEstimate:  # fmt: skip
  """What a kernel must move and compute, for the compiler's schedule.

  `flops` are per query, source, token and lane; norms come on top.
  """
  return pl.CostEstimate(
    flops=(flops * num_queries + 2) * num_slots * num_tokens * width,
    bytes_accessed=num_tokens * (token_bytes + 4 * num_queries),
    transcendentals=num_queries * num_slots * num_tokens,
  )


def query_terms(query_QD: jax.Array, dtype: Any) -> jax.Array:
  """[terms * Q, D]: three bfloat16 terms that sum to the query; one for
  float32.
  """
  if dtype == jnp.float32:
    return query_QD
  terms = []
  for _ in range(3):
    # Not a cast to bfloat16 and back, which the compiler may drop.
    term = jax.lax.reduce_precision(query_QD, exponent_bits=8, mantissa_bits=7)
    terms.append(term.astype(jnp.bfloat16))
    query_QD = query_QD - term
  return jnp.concatenate(terms)


def sum_terms(products: jax.Array, count: int) -> jax.Array:
  """The sum over the terms of `query_terms`, blocks of `count` rows."""
  return total(
    products[first : first + count]
    for first in range(0, products.shape[0], count)
  )


def flatten(
  sources: tuple[jax.Array, ...],
) -> tuple[tuple[int, ...], list[jax.Array], int]:
  """(token axes, one [tokens, D] operand per source, tokens)."""
  shape = sources[0].shape
  num_tokens = 1
  for axis in shape[:-1]:
    num_tokens *= axis
  flat = [source.reshape(num_tokens, shape[-1]) for source in sources]
  return shape[:-1], flat, num_tokens


def constant_spec(array: jax.Array) -> pl.BlockSpec:
  """The block spec of an array that every step sees in full."""
  return pl.BlockSpec(array.shape, lambda *i: (0,) * array.ndim)


def stats_to_tiles(x_QT: jax.Array, tile: int) -> jax.Array:
  """[Q, tokens] to [tiles, Q, tile], padded with zeros."""
  num_queries, num_tokens = x_QT.shape
  tiles = pl.cdiv(num_tokens, tile)
  x = jnp.pad(x_QT, ((0, 0), (0, tiles * tile - num_tokens)))
  return jnp.moveaxis(x.reshape(num_queries, tiles, tile), 0, 1)


def stats_from_tiles(x: jax.Array, num_tokens: int) -> jax.Array:
  tiles, num_queries, tile = x.shape
  x = jnp.moveaxis(x, 1, 0).reshape(num_queries, tiles * tile)
  return x[:, :num_tokens]


def load_sources(
  source_refs: Any, rows: slice, valid: jax.Array | None, chunk: slice
) -> jax.Array:
  """[M*8, lanes] of one group of tokens."""
  return concatenate([ref[rows, chunk] for ref in source_refs], valid)


def concatenate(parts: list[jax.Array], valid: jax.Array | None) -> jax.Array:
  """Stacks rows; padding rows of `parts` become zero."""
  if valid is not None:
    parts = [jnp.where(valid, part, jnp.zeros_like(part)) for part in parts]
  return jnp.concatenate(parts, axis=0)


def valid_rows(
  num_tokens: int, tile: int, base: Any, rows: int
) -> jax.Array | None:
  """Which of the rows from `base` on are tokens; None if all are."""
  if num_tokens % tile == 0:
    return None
  return iota((rows, 1), 0) < num_tokens - base


def inverse_rms(
  load: Callable[[slice], jax.Array], columns: Any, eps: float
) -> jax.Array:
  """Inverse norm of the key of every source row of a group: [M*8, 1]."""
  square = 0.0
  for piece in columns.keys:
    wide = columns.only_keys(piece, load(piece.columns)).astype(jnp.float32)
    square += jnp.sum(wide * wide, axis=1, keepdims=True)
  return jax.lax.rsqrt(square * (1.0 / columns.key_width) + eps)


def on_slots(x: jax.Array) -> jax.Array:
  """[M*8, Q] as [M, 8, Q], for sums over the sources of a token."""
  return x.reshape(-1, GROUP, x.shape[-1])


def where(mask: jax.Array | None, x: jax.Array, otherwise: Any) -> jax.Array:
  return x if mask is None else jnp.where(mask, x, otherwise)


def pull_terms(terms: jax.Array, num_queries: int) -> jax.Array:
  """The factors of high, high and low pulls: high, low, high."""
  if terms.shape[0] == num_queries:
    return terms
  return jnp.concatenate([terms[: 2 * num_queries], terms[:num_queries]])


def take_columns(
  x: jax.Array,
  column: Callable[[jax.Array, jax.Array], jax.Array],
  count: int = LANES,
) -> jax.Array:
  """x[r, column(r, i)] for i < count <= 128, by gathers within registers.

  Args:
    x: [rows, columns] float32.
    column: maps int32 arrays r and i to column numbers.
    count: columns of the result.
  """
  shape = (x.shape[0], LANES)
  at = column(iota(shape, 0), iota(shape, 1))
  x = pad_lanes(x)
  parts = [
    jnp.take_along_axis(
      x[:, first : first + LANES],
      jnp.bitwise_and(at, LANES - 1),
      axis=1,
      mode="promise_in_bounds",
    )
    for first in range(0, x.shape[1], LANES)
  ]
  taken = parts[0]
  for i, part in enumerate(parts[1:], 1):
    taken = jnp.where(at >= i * LANES, part, taken)
  return taken[:, :count]


def pad_lanes(x: jax.Array) -> jax.Array:
  """Zero columns up to the next multiple of 128."""
  missing = -x.shape[1] % LANES
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


def chunks(width: int, lanes: int) -> list[slice]:
  return [slice(i, min(i + lanes, width)) for i in range(0, width, lanes)]


def total(terms: Iterable[jax.Array]) -> jax.Array:
  return functools.reduce(operator.add, terms)


def iota(shape: tuple[int, ...], dimension: int) -> jax.Array:
  return jax.lax.broadcasted_iota(jnp.int32, shape, dimension)


def dot(
  a: jax.Array, b: jax.Array, b_axis: int = 0, *, exact: bool
) -> jax.Array:
  return jax.lax.dot_general(
    a,
    b,
    (((1,), (b_axis,)), ((), ())),
    precision=jax.lax.Precision.HIGHEST if exact else None,
    preferred_element_type=jnp.float32,
  )
