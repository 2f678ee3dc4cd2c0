# SPDX-License-Identifier: Apache-2.0
"""KDA in chunks, in plain JAX: one forward pass, differentiated by autodiff.

The chunkwise form of Kimi Linear (its Eq. 2-9). With G the running sum of the
log-decays inside a chunk of C tokens, S the state at its start, and everything
per head:

  A_ij = sum_k k_i k_j exp(G_i - G_j)   for j < i
  P_ij = sum_k q_i k_j exp(G_i - G_j)   for j <= i
  Z = (I + A diag(beta))^-1 (V - (exp(G) K) S)      what each token still adds
  O = (exp(G) Q) S + P (beta Z)
  S <- exp(G_C) S + (exp(G_C - G) K)^T (beta Z)

Only the two lines with S are sequential: one scan over chunks carries S.
Everything else is batched over chunks.

A, P and the inverse are built along a binary tree: two adjacent blocks of s
tokens, already computed, become one of 2s. The new part is the square of the
later block's rows and the earlier block's columns, where

  exp(G_i - G_j) = exp(sum of g after m up to i) exp(sum of g after j up to m)

and m is the last token of the earlier block. A square is then one matrix
product. The two sums are built along the same tree and never as a difference of
longer sums. So no factor exceeds 1 and none loses precision, however long or
strong the decay, and a log-decay of -inf needs no special case. The inverse of
a block triangular matrix needs two more products, and is as stable as forward
substitution: powers of A, which can be huge where the inverse is not, do not
occur.

Only the arguments are saved: the backward pass computes everything again.
Decays, the state and the inverse are float32 (float64 for float64 inputs); the
wide products take bfloat16 operands when the inputs are bfloat16.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Of an equation and two operands.
_Product = Callable[[str, jax.Array, jax.Array], jax.Array]


class _Square(NamedTuple):
  """For each pair of blocks: rows of the later and columns of the earlier
  block.
  """

  size: int
  rows_q: jax.Array  # [..., pairs, size, K]
  rows_k: jax.Array
  columns: jax.Array


class _Chunks(NamedTuple):
  """The arguments in chunks, [N, B, H, C, ...], and the decays inside them."""

  q: jax.Array  # Scaled.
  k: jax.Array
  v: jax.Array
  beta: jax.Array
  squares: list[_Square]  # From the smallest to the largest.
  carried: jax.Array  # Decay from the chunk's start to each token.
  left: jax.Array  # Decay from each token to the chunk's end.
  chunk_decay: jax.Array  # Decay of the whole chunk, [N, B, H, K].


def kda(
  *arguments: jax.Array, scale: float, chunk_size: int, save: str
) -> tuple[jax.Array, jax.Array]:
  """Returns the outputs and the last state."""
  del save  # Always the arguments: states take K / C times as much as keys.
  run = functools.partial(forward, scale=scale, chunk_size=chunk_size)
  return jax.checkpoint(run)(*arguments)


def forward(
  q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array,
  state: jax.Array, *, scale: float, chunk_size: int,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
  """Returns the outputs and the last state."""
  dot = _products(q, k, v)
  length = q.shape[1]
  c = _chunks(q, k, v, g, beta, state.dtype, scale, chunk_size)
  pairs, inverse = _tree(c, dot)
  z, starts, state = _states(c, inverse, state, dot)
  o = dot("...ck,...kv->...cv", c.q * c.carried, starts)
  o += dot("...ij,...jv->...iv", pairs, c.beta[..., None] * z)
  return _unchunk(o, length, chunk_size).astype(v.dtype), state


def _states(
  c: _Chunks, inverse: jax.Array, state: jax.Array, dot: _Product
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Scans over chunks: what each token adds, and the state before each."""
  values = dot("...ij,...jv->...iv", inverse, c.v)
  reads = dot("...ij,...jk->...ik", inverse, c.k * c.carried)
  writes = c.beta[..., None] * c.k * c.left

  def body(state: jax.Array, chunk: Any) -> tuple[jax.Array, Any]:
    values, reads, writes, chunk_decay = chunk
    z = values - dot("...ck,...kv->...cv", reads, state)
    after = chunk_decay[..., None] * state
    after += dot("...ck,...cv->...kv", writes, z)
    return after, (z, state)

  state, (z, starts) = jax.lax.scan(
    body, state, (values, reads, writes, c.chunk_decay)
  )
  return z, starts, state


def _tree(c: _Chunks, dot: _Product) -> tuple[jax.Array, jax.Array]:
  """Returns P and the inverse of I + A diag(beta), both [N, B, H, C, C]."""
  # Diagonal blocks, [..., number of blocks, size, size].
  pairs = jnp.sum(c.q * c.k, axis=-1)[..., None, None]
  inverse = jnp.ones_like(pairs)
  exact = functools.partial(_dot, None, "...ij,...jk->...ik")
  for square in c.squares:
    rows = jnp.concatenate([square.rows_k, square.rows_q], axis=-2)
    block = dot("...ik,...jk->...ij", rows, square.columns)
    new_keys, new_pairs = jnp.split(block, 2, axis=-2)
    beta, _ = _halves(c.beta, square.size, -1)
    below = new_keys * beta[..., None, :]
    first, second = (x[..., 0, :, :] for x in _halves(inverse, 1, -3))
    new_inverse = -exact(second, exact(below, first))
    pairs = _join(pairs, new_pairs)
    inverse = _join(inverse, new_inverse)
  return pairs[..., 0, :, :], inverse[..., 0, :, :]


def _chunks(
  q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array,
  dtype: Any, scale: float, chunk_size: int,
) -> _Chunks:  # fmt: skip
  q, k, v, g, beta = (
    _chunk(x.astype(dtype), q.shape[1], chunk_size) for x in (q, k, v, g, beta)
  )
  q = scale * q
  squares, size = [], 1
  prefix, suffix = g, jnp.zeros_like(g)
  while size < g.shape[-2]:
    early_prefix, late_prefix = _halves(prefix, size)
    early_suffix, late_suffix = _halves(suffix, size)
    row_decay, column_decay = jnp.exp(late_prefix), jnp.exp(early_suffix)
    columns, rows_k = _halves(k, size)
    squares.append(
      _Square(
        size,
        rows_q=_halves(q, size)[1] * row_decay,
        rows_k=rows_k * row_decay,
        columns=columns * column_decay,
      )
    )
    late_total = late_prefix[..., -1:, :]
    late_prefix += early_prefix[..., -1:, :]
    prefix = _interleaved(early_prefix, late_prefix).reshape(g.shape)
    suffix = _interleaved(early_suffix + late_total, late_suffix).reshape(
      g.shape
    )
    size *= 2
  carried = jnp.exp(prefix)
  return _Chunks(
    q, k, v, beta, squares, carried, jnp.exp(suffix), carried[..., -1, :]
  )


def _halves(
  x: jax.Array, size: int, axis: int = -2
) -> tuple[jax.Array, jax.Array]:
  """Even and odd blocks: two arrays, with the axis split into (pairs, size)."""
  axis %= x.ndim
  shape = x.shape[:axis] + (-1, 2, size) + x.shape[axis + 1 :]
  x = x.reshape(shape)
  return (
    jax.lax.index_in_dim(x, 0, axis + 1, keepdims=False),
    jax.lax.index_in_dim(x, 1, axis + 1, keepdims=False),
  )


def _interleaved(even: jax.Array, odd: jax.Array) -> jax.Array:
  """The inverse of `_halves`, along the second-to-last axis: [..., blocks,
  ...].
  """
  shape = even.shape[:-3] + (2 * even.shape[-3],) + even.shape[-2:]
  return jnp.stack([even, odd], axis=-3).reshape(shape)


def _join(blocks: jax.Array, below: jax.Array) -> jax.Array:
  """Diagonal blocks of twice the size, zero above the diagonal."""
  first, second = _halves(blocks, 1, -3)
  first, second = first[..., 0, :, :], second[..., 0, :, :]
  top = jnp.concatenate([first, jnp.zeros_like(below)], axis=-1)
  bottom = jnp.concatenate([below, second], axis=-1)
  return jnp.concatenate([top, bottom], axis=-2)


def _chunk(x: jax.Array, length: int, chunk_size: int) -> jax.Array:
  """[B, T, H, ...] to [N, B, H, C, ...], padded with zeros.

  The tree needs a power of two; chunks of other sizes are padded too.
  """
  size = min(chunk_size, length)
  number = -(-length // size)
  rest = [(0, 0)] * (x.ndim - 2)
  x = jnp.pad(x, [(0, 0), (0, number * size - length), *rest])
  x = x.reshape(x.shape[0], number, size, *x.shape[2:])
  padding = (1 << (size - 1).bit_length()) - size
  x = jnp.pad(x, [(0, 0), (0, 0), (0, padding), *rest])
  return jnp.moveaxis(x, (1, 3), (0, 2))


def _unchunk(x: jax.Array, length: int, chunk_size: int) -> jax.Array:
  """The inverse of `_chunk`."""
  size = min(chunk_size, length)
  x = jnp.moveaxis(x[:, :, :, :size], (0, 2), (1, 3))
  x = x.reshape(x.shape[0], -1, *x.shape[3:])
  return x[:, :length]


def _products(*arrays: jax.Array) -> _Product:
  """Matrix products in bfloat16 if all arrays are bfloat16, else in full
  precision.
  """
  low = all(x.dtype == jnp.bfloat16 for x in arrays)
  return functools.partial(_dot, jnp.bfloat16 if low else None)


def _dot(dtype: Any, equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
  out = a.dtype
  if dtype is not None:
    a, b = a.astype(dtype), b.astype(dtype)
  exact = a.dtype != jnp.bfloat16
  return jnp.einsum(
    equation,
    a,
    b,
    precision=jax.lax.Precision.HIGHEST if exact else None,
    preferred_element_type=out,
  )
