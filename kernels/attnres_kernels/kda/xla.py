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
one carries its gradient back. All else is batched over the chunks.

A, P and the inverse are built up a binary tree: two neighbouring blocks of s
tokens, each of which is known already, become one of 2s. What is new is the
square of the later block's rows and the earlier block's columns, where

  exp(G_i - G_j) = exp(G_i - G_ref) exp(G_ref - G_j),   j <= ref < i

with ref the last token of the earlier block. Both exponents are sums of
log-decays, hence no factor exceeds 1 however long or strong the decay, and a
square is one matrix product. The inverse of a block triangular matrix needs
two more, and is as stable as forward substitution: powers of A, which can be
huge where the inverse is not, never occur.

A reset (the first token of a packed document) takes its log-decay out of G and
masks whatever would reach across it, so it is exact and costs no precision.

Nothing is saved but the arguments: backward runs the scan over states again.
Decays, the state and the inverse are float32 (float64 for float64 inputs); the
wide products take bfloat16 operands when the inputs are bfloat16.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class _Chunks(NamedTuple):
  """The arguments in chunks, [N, B, H, C, ...], and the decays inside them."""

  q: jax.Array  # Scaled.
  k: jax.Array
  v: jax.Array
  beta: jax.Array
  decay: jax.Array  # G, the running sum.
  count: jax.Array | None  # Resets up to and including a token, [N, B, 1, C].


def forward(q, k, v, g, beta, state, reset, *, scale, chunk_size):
  """Returns the outputs and the last state."""
  dot = _products(q, k, v)
  length = q.shape[1]
  chunks = _chunks(q, k, v, g, beta, state.dtype, reset, scale, chunk_size)
  _, pairs, inverse = _tree(chunks, dot)
  carried, left, whole = _decays(chunks)
  z, starts, state = _states(chunks, inverse, carried, left, whole, state, dot)
  o = dot("...ck,...kv->...cv", chunks.q * carried, starts)
  o += dot("...ij,...jv->...iv", pairs, chunks.beta[..., None] * z)
  return _unchunk(o, length, chunk_size).astype(v.dtype), state


def backward(q, k, v, g, beta, state, reset, do, dstate, *, scale, chunk_size):
  """Returns the gradients of q, k, v, g, beta and the first state."""
  dot = _products(q, k, v)
  length = q.shape[1]
  c = _chunks(q, k, v, g, beta, state.dtype, reset, scale, chunk_size)
  keys, pairs, inverse = _tree(c, dot)
  carried, left, whole = _decays(c)
  z, starts, _ = _states(c, inverse, carried, left, whole, state, dot)
  do = _chunk(do.astype(state.dtype), length, chunk_size)
  beta_column = c.beta[..., None]

  # With x the gradient of V - (exp(G) K) S, which is that of v:
  # x = inverse^T beta (P^T do + (exp(G_C - G) K) dS).
  added = dot("...ij,...iv->...jv", pairs, do)
  x_own = dot("...ij,...iv->...jv", inverse, beta_column * added)
  x_state = dot("...ij,...ik->...jk", inverse, beta_column * c.k * left)

  def body(dstate, chunk):
    start, q_in, k_in, x_own, x_state, do, z, whole = chunk
    x = x_own + dot("...ck,...kv->...cv", x_state, dstate)
    dq_in = dot("...cv,...kv->...ck", do, start)
    dk_in = -dot("...cv,...kv->...ck", x, start)
    dk_out = dot("...cv,...kv->...ck", z, dstate)
    dwhole = whole * jnp.sum(start * dstate, axis=-1)
    dstate = whole[..., None] * dstate
    dstate += dot("...ck,...cv->...kv", q_in, do)
    dstate -= dot("...ck,...cv->...kv", k_in, x)
    return dstate, (x, dq_in, dk_in, dk_out, dwhole)

  dstate, (x, dq_in, dk_in, dk_out, dwhole) = jax.lax.scan(
    body,
    dstate,
    (starts, c.q * carried, c.k * carried, x_own, x_state, do, z, whole),
    reverse=True,
  )

  dpairs = _lower(dot("...iv,...jv->...ij", do, beta_column * z), c.count)
  dsystem = -_lower(dot("...iv,...jv->...ij", x, z), c.count, strict=True)
  dbeta = (
    jnp.sum(added * z, axis=-1)
    + jnp.sum(c.k * left * dk_out, axis=-1)
    + jnp.sum(dsystem * keys, axis=-2)
  )
  dq, dk, ddecay = _tree_gradient(
    c, dsystem * c.beta[..., None, :], dpairs, dot
  )
  # G enters through products of it with q or k alone: its gradient is theirs
  # times q or k. A token with itself is not decayed, and comes last.
  dq_in *= carried
  dk_in *= carried
  dk_out *= beta_column * left
  ddecay += c.q * dq_in + c.k * (dk_in - dk_out)
  dlast = dwhole + jnp.sum(c.k * dk_out, axis=-2)
  own = jnp.diagonal(dpairs, axis1=-2, axis2=-1)[..., None]
  dq += dq_in + own * c.k
  dk += dk_in + dk_out + own * c.q
  dg = _suffix_sum(ddecay) + dlast[..., None, :]
  dq, dk, dv, dg, dbeta = (
    _unchunk(d, length, chunk_size) for d in (scale * dq, dk, x, dg, dbeta)
  )
  # No gradient through a decay that is zero.
  dg = jnp.where(g > _floor(g.dtype), dg, 0)
  if reset is not None:
    dg = jnp.where(reset[..., None, None], 0, dg)
  return (
    dq.astype(q.dtype),
    dk.astype(k.dtype),
    dv.astype(v.dtype),
    dg.astype(g.dtype),
    dbeta.astype(beta.dtype),
    dstate,
  )


def _states(c, inverse, carried, left, whole, state, dot):
  """Scans over the chunks: what each token adds, and the state before each."""
  values = dot("...ij,...jv->...iv", inverse, c.v)
  reads = dot("...ij,...jk->...ik", inverse, c.k * carried)
  writes = c.beta[..., None] * c.k * left

  def body(state, chunk):
    values, reads, writes, whole = chunk
    z = values - dot("...ck,...kv->...cv", reads, state)
    after = whole[..., None] * state
    after += dot("...ck,...cv->...kv", writes, z)
    return after, (z, state)

  state, (z, starts) = jax.lax.scan(body, state, (values, reads, writes, whole))
  return z, starts, state


def _tree(c, dot):
  """Returns A, P and the inverse of I + A diag(beta), each [N, B, H, C, C]."""
  # Diagonal blocks of the three, [..., number of blocks, size, size].
  keys = jnp.zeros_like(c.beta)[..., None, None]
  pairs = jnp.sum(c.q * c.k, axis=-1)[..., None, None]
  inverse = jnp.ones_like(keys)
  exact = functools.partial(_dot, c.k.dtype)
  for size in _sizes(c):
    rows_q, rows_k, columns, _, _ = _square(c, size)
    rows = jnp.concatenate([rows_k, rows_q], axis=-2)
    block = dot("...ik,...jk->...ij", rows, columns)
    new_keys, new_pairs = jnp.split(block, 2, axis=-2)
    if c.count is not None:
      earlier, later = _halves(c.count, size, -1)
      same = later[..., :, None] == earlier[..., None, :]
      new_keys = jnp.where(same, new_keys, 0)
      new_pairs = jnp.where(same, new_pairs, 0)
    first, second = _halves(inverse, 1, -3)
    first, second = first[..., 0, :, :], second[..., 0, :, :]
    beta, _ = _halves(c.beta, size, -1)
    new_inverse = -exact(
      "...ij,...jk->...ik",
      second,
      exact("...ij,...jk->...ik", new_keys * beta[..., None, :], first),
    )
    keys = _join(keys, new_keys)
    pairs = _join(pairs, new_pairs)
    inverse = _join(inverse, new_inverse)
  return keys[..., 0, :, :], pairs[..., 0, :, :], inverse[..., 0, :, :]


def _tree_gradient(c, dkeys, dpairs, dot):
  """Gradients of q, k and G through the squares of A and P."""
  dq = jnp.zeros_like(c.q)
  dk = jnp.zeros_like(c.k)
  ddecay = jnp.zeros_like(c.k)
  for size in _sizes(c):
    rows_q, rows_k, columns, row_decay, column_decay = _square(c, size)
    dblock = jnp.concatenate(
      [_below(dkeys, size), _below(dpairs, size)], axis=-2
    )
    rows = jnp.concatenate([rows_k, rows_q], axis=-2)
    drows = dot("...ij,...jk->...ik", dblock, columns)
    dcolumns = dot("...ij,...ik->...jk", dblock, rows) * column_decay
    drows_k, drows_q = jnp.split(drows, 2, axis=-2)
    drows_k, drows_q = drows_k * row_decay, drows_q * row_decay
    part_q = _whole(jnp.zeros_like(drows_q), drows_q, c.q.shape)
    dq += part_q
    dk += _whole(dcolumns, drows_k, c.k.shape)
    ddecay += c.q * part_q + c.k * _whole(-dcolumns, drows_k, c.k.shape)
  return dq, dk, ddecay


def _sizes(c):
  size, sizes = 1, []
  while size < c.k.shape[-2]:
    sizes.append(size)
    size *= 2
  return sizes


def _square(c, size):
  """Decayed rows of q and k, decayed columns of k, and the two decays."""
  _, rows_q = _halves(c.q, size)
  columns, rows_k = _halves(c.k, size)
  earlier, later = _halves(c.decay, size)
  middle = earlier[..., -1:, :]
  row_decay = jnp.exp(later - middle)
  column_decay = jnp.exp(middle - earlier)
  return (
    rows_q * row_decay,
    rows_k * row_decay,
    columns * column_decay,
    row_decay,
    column_decay,
  )


def _halves(x, size, axis=-2):
  """Even and odd blocks: two arrays, the axis in (number of pairs, size)."""
  axis %= x.ndim
  shape = x.shape[:axis] + (-1, 2, size) + x.shape[axis + 1 :]
  x = x.reshape(shape)
  return (
    jax.lax.index_in_dim(x, 0, axis + 1, keepdims=False),
    jax.lax.index_in_dim(x, 1, axis + 1, keepdims=False),
  )


def _whole(even, odd, shape):
  """The inverse of `_halves` along the second last axis."""
  return jnp.stack([even, odd], axis=-3).reshape(shape)


def _join(blocks, below):
  """Diagonal blocks of twice the size, zero above the diagonal."""
  first, second = _halves(blocks, 1, -3)
  first, second = first[..., 0, :, :], second[..., 0, :, :]
  top = jnp.concatenate([first, jnp.zeros_like(below)], axis=-1)
  bottom = jnp.concatenate([below, second], axis=-1)
  return jnp.concatenate([top, bottom], axis=-2)


def _below(matrix, size):
  """The squares [pairs, size, size] that `_join` puts below the diagonal."""
  pairs = matrix.shape[-1] // (2 * size)
  squares = [
    matrix[..., at + size : at + 2 * size, at : at + size]
    for at in range(0, 2 * size * pairs, 2 * size)
  ]
  return jnp.stack(squares, axis=-3)


def _lower(matrix, count, strict=False):
  """Keeps what is on or below the diagonal and crosses no reset."""
  size = matrix.shape[-1]
  row, column = jnp.arange(size)[:, None], jnp.arange(size)[None]
  keep = (column < row) if strict else (column <= row)
  keep = keep.reshape((1,) * (matrix.ndim - 2) + keep.shape)
  if count is not None:
    keep = keep & (count[..., :, None] == count[..., None, :])
  return jnp.where(keep, matrix, 0)


def _decays(c):
  """From the chunk's start to each token, from each to its end, and whole."""
  last = c.decay[..., -1:, :]
  carried, left = jnp.exp(c.decay), jnp.exp(last - c.decay)
  if c.count is not None:
    carried = jnp.where(c.count[..., None] == 0, carried, 0)
    left = jnp.where(c.count[..., None] == c.count[..., -1:, None], left, 0)
  return carried, left, carried[..., -1, :]


def _chunks(q, k, v, g, beta, dtype, reset, scale, chunk_size):
  g = jnp.maximum(g, _floor(g.dtype))
  count = None
  if reset is not None:
    g = jnp.where(reset[..., None, None], 0, g)
    count = _chunk(
      reset[..., None].astype(jnp.int32), reset.shape[1], chunk_size
    )
    count = jnp.cumsum(count, axis=-1)
  q, k, v, g, beta = (
    _chunk(x.astype(dtype), q.shape[1], chunk_size) for x in (q, k, v, g, beta)
  )
  return _Chunks(q * scale, k, v, beta, jnp.cumsum(g, axis=-2), count)


def _floor(dtype):
  """A log-decay whose exponential is zero: less changes nothing.

  Bounding it keeps -inf - -inf away, and running sums small and thus precise.
  """
  return -760.0 if dtype == jnp.float64 else -110.0


def _chunk(x, length, chunk_size):
  """[B, T, H, ...] to [N, B, H, C, ...], with zeros where there is no token.

  The tree wants a power of two; chunks of another size are padded, too.
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


def _suffix_sum(x):
  """Sums from each token of a chunk to its end."""
  return jnp.flip(jnp.cumsum(jnp.flip(x, axis=-2), axis=-2), axis=-2)


def _products(*arrays):
  """Matrix products in bfloat16 if all arrays are, else in full precision."""
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
