# SPDX-License-Identifier: Apache-2.0
"""One chunk of KDA in the registers of a TPU, for both directions.

- The exponents of all levels of the tree, and those from the chunk's start and
  to its end, are sums of log-decays over index ranges: one product of a 0/1
  matrix with g, which is split into bfloat16 terms. Its transpose propagates
  the gradients. No differences are taken.
- A level's square is cut out of a full C x C product by a mask.
- The inverse of the triangular system is float32: a Newton step corrects the
  error of products of bfloat16 operands. Float32 inputs use float32 products
  throughout.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# A decay by this resets everything; with -inf, 0 * -inf would be NaN.
_FORGET = -1e4


class Chunk:
  """The quantities of one chunk and head that do not depend on the state."""

  def __init__(self, q, k, g, beta, ranges_ref, scale):
    self.exact = k.dtype == jnp.float32
    self.size, _ = k.shape
    self.beta = beta
    self.k = k.astype(jnp.float32)
    self.q: Any = None if q is None else q.astype(jnp.float32) * scale
    exponents = range_sums(ranges_ref, jnp.maximum(g, _FORGET), k.dtype)
    self.decays = jnp.exp(exponents)
    levels = num_levels(self.size)
    self.carried = self.decay(levels)
    self.left = self.decay(levels + 1)
    self.whole = self.carried[-1:]
    self.k_out = self.k * self.left
    self.both_in = self._rows(self.carried)
    row, column = (_iota((self.size, self.size), axis) for axis in (0, 1))
    self.diagonal = row == column
    self.below = row > column
    self._differ = row ^ column
    self._square()

  def _square(self):
    """A and P, [C, C], from the squares of the tree and the diagonal."""
    self.keys = jnp.zeros((self.size, self.size), jnp.float32)
    if self.q is not None:
      self.pairs = jnp.where(self.diagonal, self.dot(self.q, self.k, 1), 0.0)
    for level in range(num_levels(self.size)):
      mask, rows = self.mask(level), self.rows(level)
      square = self.dot(rows, rows[: self.size], 1)
      self.keys = jnp.where(mask, square[: self.size], self.keys)
      if self.q is not None:
        self.pairs = jnp.where(mask, square[self.size :], self.pairs)

  def mask(self, level):
    """Rows of the later block, columns of the earlier, by their first bit."""
    return ((self._differ >> level) == 1) & self.below

  def decay(self, level):
    return self.decays[level * self.size : (level + 1) * self.size]

  def rows(self, level):
    """Of k, then of q; those of k also serve as columns."""
    return self._rows(self.decay(level))

  def _rows(self, decay):
    if self.q is None:
      return self.k * decay
    return jnp.concatenate([self.k * decay, self.q * decay], axis=0)

  def next(self, state, z):
    """The state after the chunk, including z."""
    return self.whole * state + self.dot(
      as_column(self.beta) * z, self.k_out, 0, 0
    )

  def dot(self, a, b, b_axis=0, a_axis=1):
    return _dot(a, b, b_axis, a_axis, exact=self.exact)


def solve(chunks, states, values):
  """Inverses, what k and q read from the states, and what tokens write."""
  inverses = _inverses(chunks)
  reads = [c.dot(c.both_in, s, 1) for c, s in zip(chunks, states)]
  z = [
    c.dot(inverse, value.astype(jnp.float32) - read[: c.size])
    for c, inverse, value, read in zip(chunks, inverses, values, reads)
  ]
  return inverses, reads, z


def _inverses(chunks):
  """Inverses of I + A diag(beta) in float32, all chunks in lockstep."""
  systems = [c.keys * c.beta for c in chunks]
  inverses = [
    jnp.where(c.diagonal, 1.0, jnp.where(c.mask(0), -system, 0.0))
    for c, system in zip(chunks, systems)
  ]
  for level in range(1, num_levels(chunks[0].size)):
    squares = [
      jnp.where(c.mask(level), system, 0.0)
      for c, system in zip(chunks, systems)
    ]
    halves = [
      c.dot(x, square) for c, x, square in zip(chunks, inverses, squares)
    ]
    inverses = [
      x - c.dot(half, x) for c, half, x in zip(chunks, halves, inverses)
    ]
  if chunks[0].exact:
    return inverses
  # One Newton step squares the error of the products in bfloat16.
  inverses = [x.astype(jnp.bfloat16) for x in inverses]
  products = [
    sum(c.dot(term, x) for term in _split(system, 2))
    for c, system, x in zip(chunks, systems, inverses)
  ]
  rests = [
    (jnp.where(c.diagonal, 1.0, 0.0) - x).astype(jnp.float32) - product
    for c, x, product in zip(chunks, inverses, products)
  ]
  return [
    x.astype(jnp.float32) + c.dot(x, rest)
    for c, x, rest in zip(chunks, inverses, rests)
  ]


def num_levels(size):
  return size.bit_length() - 1


def ranges(size, dtype, turned=False):
  """0/1 rows that select the log-decays of an exponent, [(levels + 2) C, C].

  Per level, between the boundary of two blocks and a token: up to a token of
  the later block, or from after a token of the earlier block. Then the same
  from the chunk's start, and to its end. Repeated side by side for each term.
  """
  row, column = np.arange(size)[:, None], np.arange(size)[None]
  sums = []
  for level in range(num_levels(size)):
    middle = ((row >> (level + 1)) * 2 + 1) << level
    sums.append(
      ((middle <= column) & (column <= row))
      | ((row < column) & (column < middle))
    )
  sums += [column <= row, column > row]
  sums = np.concatenate(sums).astype(np.float32)
  return np.tile(sums.T if turned else sums, (1, _terms(dtype)))


def _terms(dtype):
  """Bfloat16 terms of the summands: 8 bits more than the result needs."""
  return 3 if dtype == jnp.float32 else 2


def range_sums(ranges_ref, x, dtype):
  """The ranges are 0 or 1, so only x is rounded, to this many terms."""
  return _dot(
    ranges_ref[...], jnp.concatenate(_split(x, _terms(dtype)), axis=0)
  )


def _split(x, terms):
  """Bfloat16 terms whose sum is x to about 8 bits per term."""
  parts = []
  for _ in range(terms):
    parts.append(x.astype(jnp.bfloat16))
    x = x - parts[-1].astype(jnp.float32)
  return parts


def as_column(row):
  """[1, C] to [C, 1]."""
  size = row.shape[-1]
  shape = size, size
  diagonal = _iota(shape, 0) == _iota(shape, 1)
  return jnp.sum(jnp.where(diagonal, row, 0.0), axis=1, keepdims=True)


def _iota(shape, dimension):
  return jax.lax.broadcasted_iota(jnp.int32, shape, dimension)


def _dot(a, b, b_axis=0, a_axis=1, *, exact=False):
  if not exact:
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
  return jax.lax.dot_general(
    a,
    b,
    (((a_axis,), (b_axis,)), ((), ())),
    precision=jax.lax.Precision.HIGHEST if exact else None,
    preferred_element_type=jnp.float32,
  )
