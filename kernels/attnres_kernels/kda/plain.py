# SPDX-License-Identifier: Apache-2.0
"""KDA in chunks, in plain JAX, forward and backward by hand.

The chunkwise form of Kimi Linear (its Eq. 2-9). With G the running sum of the
log-decays inside a chunk of C tokens, S the state at its start, and everything
per head:

  A_ij = sum_k k_i k_j exp(G_i - G_j)   for j < i
  P_ij = sum_k q_i k_j exp(G_i - G_j)   for j <= i
  Z = (I + A diag(beta))^-1 (V - (exp(G) K) S)      what each token still adds
  O = (exp(G) Q) S + P (beta Z)
  S <- exp(G_C) S + (exp(G_C - G) K)^T (beta Z)

Only the two lines with S are sequential: one scan over chunks carries S, and
one carries its gradient back. Everything else is batched over chunks.

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

Only the arguments are saved: the backward pass recomputes the scan over states.
Decays, the state and the inverse are float32 (float64 for float64 inputs); the
wide products take bfloat16 operands when the inputs are bfloat16.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class _Square(NamedTuple):
  """For each pair of blocks: rows of the later and columns of the earlier
  block.
  """

  size: int
  rows_q: jax.Array  # [..., pairs, size, K]
  rows_k: jax.Array
  columns: jax.Array
  row_decay: jax.Array
  column_decay: jax.Array


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


def kda(*arguments, scale, chunk_size, save):
  """Returns the outputs and the last state; may be differentiated once."""
  del save  # Always the arguments.
  return _kda(scale, chunk_size, *arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kda(scale, chunk_size, *arguments):
  return forward(*arguments, scale=scale, chunk_size=chunk_size)


def _kda_forward(scale, chunk_size, *arguments):
  # States take K / C times as much memory as the keys of their chunk.
  return _kda(scale, chunk_size, *arguments), arguments


def _kda_backward(scale, chunk_size, arguments, cotangents):
  return backward(*arguments, *cotangents, scale=scale, chunk_size=chunk_size)


_kda.defvjp(_kda_forward, _kda_backward)


def forward(q, k, v, g, beta, state, *, scale, chunk_size):
  """Returns the outputs and the last state."""
  dot = _products(q, k, v)
  length = q.shape[1]
  c = _chunks(q, k, v, g, beta, state.dtype, scale, chunk_size)
  _, pairs, inverse = _tree(c, dot)
  z, starts, state = _states(c, inverse, state, dot)
  o = dot("...ck,...kv->...cv", c.q * c.carried, starts)
  o += dot("...ij,...jv->...iv", pairs, c.beta[..., None] * z)
  return _unchunk(o, length, chunk_size).astype(v.dtype), state


def backward(q, k, v, g, beta, state, do, dstate, *, scale, chunk_size):
  """Returns the gradients of q, k, v, g, beta and the first state."""
  dot = _products(q, k, v)
  length = q.shape[1]
  c = _chunks(q, k, v, g, beta, state.dtype, scale, chunk_size)
  keys, pairs, inverse = _tree(c, dot)
  z, starts, _ = _states(c, inverse, state, dot)
  do = _chunk(do.astype(state.dtype), length, chunk_size)
  beta_column = c.beta[..., None]

  # x is the gradient of V - (exp(G) K) S, which is also that of v: x =
  # inverse^T beta (P^T do + (exp(G_C - G) K) dS).
  added = dot("...ij,...iv->...jv", pairs, do)
  x_own = dot("...ij,...iv->...jv", inverse, beta_column * added)
  x_state = dot("...ij,...ik->...jk", inverse, beta_column * c.k * c.left)

  def body(dstate, chunk):
    start, q_in, k_in, x_own, x_state, do, z, chunk_decay = chunk
    x = x_own + dot("...ck,...kv->...cv", x_state, dstate)
    dq_in = dot("...cv,...kv->...ck", do, start)
    dk_in = -dot("...cv,...kv->...ck", x, start)
    dk_out = dot("...cv,...kv->...ck", z, dstate)
    dchunk_decay = chunk_decay * jnp.sum(start * dstate, axis=-1)
    dstate = chunk_decay[..., None] * dstate
    dstate += dot("...ck,...cv->...kv", q_in, do)
    dstate -= dot("...ck,...cv->...kv", k_in, x)
    return dstate, (x, dq_in, dk_in, dk_out, dchunk_decay)

  dstate, (x, dq_in, dk_in, dk_out, dchunk_decay) = jax.lax.scan(
    body,
    dstate,
    (
      starts,
      c.q * c.carried,
      c.k * c.carried,
      x_own,
      x_state,
      do,
      z,
      c.chunk_decay,
    ),
    reverse=True,
  )

  dpairs = dot("...iv,...jv->...ij", do, beta_column * z)
  dsystem = -dot("...iv,...jv->...ij", x, z)
  dbeta = (
    jnp.sum(added * z, axis=-1)
    + jnp.sum(c.k * c.left * dk_out, axis=-1)
    + jnp.sum(dsystem * keys, axis=-2)
  )
  dq_in *= c.carried
  dk_in *= c.carried
  dk_out *= beta_column * c.left
  diagonal = jnp.diagonal(dpairs, axis1=-2, axis2=-1)[..., None]
  dq, dk, dg = _tree_gradient(
    c,
    dkeys=dsystem * c.beta[..., None, :],
    dpairs=dpairs,
    dq=dq_in + diagonal * c.k,
    dk=dk_in + dk_out + diagonal * c.q,
    # A decay enters only through its product with q or k, so the gradient of
    # its exponent is the gradient of that product times q or k.
    dprefix=c.q * dq_in + c.k * dk_in,
    dsuffix=c.k * dk_out,
    dtotal=dchunk_decay,
    dot=dot,
  )
  return *(
    _unchunk(gradient, length, chunk_size).astype(like.dtype)
    for gradient, like in zip(
      (scale * dq, dk, x, dg, dbeta), (q, k, v, g, beta)
    )
  ), dstate


def _states(c, inverse, state, dot):
  """Scans over chunks: what each token adds, and the state before each."""
  values = dot("...ij,...jv->...iv", inverse, c.v)
  reads = dot("...ij,...jk->...ik", inverse, c.k * c.carried)
  writes = c.beta[..., None] * c.k * c.left

  def body(state, chunk):
    values, reads, writes, chunk_decay = chunk
    z = values - dot("...ck,...kv->...cv", reads, state)
    after = chunk_decay[..., None] * state
    after += dot("...ck,...cv->...kv", writes, z)
    return after, (z, state)

  state, (z, starts) = jax.lax.scan(
    body, state, (values, reads, writes, c.chunk_decay)
  )
  return z, starts, state


def _tree(c, dot):
  """Returns A, P and the inverse of I + A diag(beta), each [N, B, H, C, C]."""
  # Diagonal blocks of the three, [..., number of blocks, size, size].
  keys = jnp.zeros_like(c.beta)[..., None, None]
  pairs = jnp.sum(c.q * c.k, axis=-1)[..., None, None]
  inverse = jnp.ones_like(keys)
  exact = functools.partial(_dot, None, "...ij,...jk->...ik")
  for square in c.squares:
    rows = jnp.concatenate([square.rows_k, square.rows_q], axis=-2)
    block = dot("...ik,...jk->...ij", rows, square.columns)
    new_keys, new_pairs = jnp.split(block, 2, axis=-2)
    first, second = (x[..., 0, :, :] for x in _halves(inverse, 1, -3))
    beta, _ = _halves(c.beta, square.size, -1)
    new_inverse = -exact(second, exact(new_keys * beta[..., None, :], first))
    keys = _join(keys, new_keys)
    pairs = _join(pairs, new_pairs)
    inverse = _join(inverse, new_inverse)
  return keys[..., 0, :, :], pairs[..., 0, :, :], inverse[..., 0, :, :]


def _tree_gradient(c, dkeys, dpairs, dq, dk, dprefix, dsuffix, dtotal, dot):
  """Adds the gradients of q, k and g through the squares, from the root down.

  A prefix is the sum of log-decays from a block's start up to a token, a suffix
  the sum from after a token to the block's end, a total the sum over the block.
  """
  dkeys, dpairs = dkeys[..., None, :, :], dpairs[..., None, :, :]
  dtotal = dtotal[..., None, None, :]
  for square in reversed(c.squares):
    size = square.size
    # Sums longer than a block contribute through the block's total.
    first, _ = _halves(dsuffix, size)
    _, second = _halves(dprefix, size)
    sums = [jnp.sum(x, axis=-2, keepdims=True) for x in (second, first)]
    dtotal = _interleaved(dtotal, dtotal) + _interleaved(*sums)
    dkeys, dkeys_below = _split(dkeys)
    dpairs, dpairs_below = _split(dpairs)
    dblock = jnp.concatenate([dkeys_below, dpairs_below], axis=-2)
    rows = jnp.concatenate([square.rows_k, square.rows_q], axis=-2)
    drows = dot("...ij,...jk->...ik", dblock, square.columns)
    dcolumns = dot("...ij,...ik->...jk", dblock, rows) * square.column_decay
    drows_k, drows_q = jnp.split(drows, 2, axis=-2)
    drows_k, drows_q = drows_k * square.row_decay, drows_q * square.row_decay
    zeros = jnp.zeros_like(dcolumns)
    part_q = _interleaved(zeros, drows_q).reshape(dq.shape)
    part_k = _interleaved(zeros, drows_k).reshape(dk.shape)
    part_columns = _interleaved(dcolumns, zeros).reshape(dk.shape)
    dq += part_q
    dk += part_k + part_columns
    dprefix += c.q * part_q + c.k * part_k
    dsuffix += c.k * part_columns
  # In a block of one token, the log-decay is both prefix and total.
  return dq, dk, dprefix + dtotal.reshape(dprefix.shape)


def _chunks(q, k, v, g, beta, dtype, scale, chunk_size):
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
        row_decay=row_decay,
        column_decay=column_decay,
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


def _halves(x, size, axis=-2):
  """Even and odd blocks: two arrays, with the axis split into (pairs, size)."""
  axis %= x.ndim
  shape = x.shape[:axis] + (-1, 2, size) + x.shape[axis + 1 :]
  x = x.reshape(shape)
  return (
    jax.lax.index_in_dim(x, 0, axis + 1, keepdims=False),
    jax.lax.index_in_dim(x, 1, axis + 1, keepdims=False),
  )


def _interleaved(even, odd):
  """The inverse of `_halves`, along the second-to-last axis: [..., blocks,
  ...].
  """
  shape = even.shape[:-3] + (2 * even.shape[-3],) + even.shape[-2:]
  return jnp.stack([even, odd], axis=-3).reshape(shape)


def _join(blocks, below):
  """Diagonal blocks of twice the size, zero above the diagonal."""
  first, second = _halves(blocks, 1, -3)
  first, second = first[..., 0, :, :], second[..., 0, :, :]
  top = jnp.concatenate([first, jnp.zeros_like(below)], axis=-1)
  bottom = jnp.concatenate([below, second], axis=-1)
  return jnp.concatenate([top, bottom], axis=-2)


def _split(blocks):
  """The inverse of `_join`: diagonal blocks, and what is below them."""
  size = blocks.shape[-1] // 2
  first = blocks[..., :size, :size]
  second = blocks[..., size:, size:]
  below = blocks[..., size:, :size]
  shape = blocks.shape[:-3] + (-1, size, size)
  return jnp.stack([first, second], axis=-3).reshape(shape), below


def _chunk(x, length, chunk_size):
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


def _unchunk(x, length, chunk_size):
  """The inverse of `_chunk`."""
  size = min(chunk_size, length)
  x = jnp.moveaxis(x[:, :, :, :size], (0, 2), (1, 3))
  x = x.reshape(x.shape[0], -1, *x.shape[3:])
  return x[:, :length]


def _products(*arrays):
  """Matrix products in bfloat16 if all arrays are bfloat16, else in full
  precision.
  """
  low = all(x.dtype == jnp.bfloat16 for x in arrays)
  return functools.partial(_dot, jnp.bfloat16 if low else None)


def _dot(dtype, equation, a, b):
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
