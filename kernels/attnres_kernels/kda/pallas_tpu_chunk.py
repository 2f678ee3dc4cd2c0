# SPDX-License-Identifier: Apache-2.0
"""One chunk of KDA in the registers of a TPU, for both directions.

Scores and inverses of a chunk are C x C. Those of n = 128 / C heads lie side by
side in the lanes, [C, n C], so that every register and every tile of the matrix
unit is full. A product that must not mix heads masks its left operand: `spread`
puts each head's lanes into separate rows.

- A level of the tree (`pallas_tpu_decay`) is one product of C rows per head:
  rows of k in the late blocks, and in the early blocks, whose rows of k have no
  use, those of q. The level's square is cut out of it by few masks, because
  masks are spilled too: three inside a register, and one per column of blocks.
- The inverse of the triangular system starts from blocks of eight tokens,
  solved in float32 by substitution, all blocks of n heads in one register.
  Larger blocks are products of bfloat16 operands, whose error a Newton step
  corrects. Float32 inputs use float32 products throughout.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnres_kernels import pallas_tpu_rows as tpu_rows
from attnres_kernels.kda import pallas_tpu_decay as decay_lib

# A decay by this resets everything; with -inf, 0 * -inf would be NaN.
_FORGET = -1e4
_LOG2_E = 1.4426950408889634
# Tokens of the blocks that are inverted by substitution: rows of a register.
_BLOCK = 8


def num_aside(heads: int, size: int, most: int) -> int:
  """How many heads lie side by side: as many as fill the lanes, if it goes."""
  most = max(1, min(most, tpu_rows.LANES // size))
  return max(n for n in range(1, most + 1) if heads % n == 0)


class Head:
  """What a chunk of one head needs that does not depend on the state."""

  def __init__(self, q: jax.Array, k: jax.Array, g: jax.Array, scale: float):
    self.k = k.astype(jnp.float32)
    self.q = q.astype(jnp.float32) * scale
    exponents = decay_lib.exponents(jnp.maximum(g, _FORGET) * _LOG2_E)
    *self.decays, self.carried, self.left = map(jnp.exp2, exponents)
    self.chunk_decay = self.carried[-1:]
    self.k_out = self.k * self.left
    self.k_in = self.k * self.carried
    self.q_in = self.q * self.carried

  def rows(self, level: int) -> tuple[jax.Array, jax.Array]:
    """Rows and columns of a level's product, [C, K] each."""
    columns = self.k * self.decays[level]
    queries = self.q * self.decays[level]
    return decay_lib.join(queries, columns, 1 << level), columns


class Aside:
  """A chunk of n heads side by side: their masks and products."""

  def __init__(self, heads: list[Head], beta: jax.Array, exact: bool):
    self.heads = heads
    self.exact = exact
    self.beta = beta
    self.size = heads[0].k.shape[0]
    shape = self.size, self.size * len(heads)
    self.row, lane = (tpu_rows.iota(shape, axis) for axis in (0, 1))
    # Sizes are powers of two; a division has to know the chip.
    self.column = lane & (self.size - 1)
    self.head = lane >> decay_lib.num_levels(self.size)
    self.diagonal = self.row == self.column
    self.below = self.row > self.column
    self._differ = self.row ^ self.column
    self.levels = decay_lib.num_levels(self.size)

  def mask(self, level: int) -> jax.Array:
    """Rows of the late block, columns of the early, by their first bit."""
    return ((self._differ >> level) == 1) & self.below

  def joined_mask(self, level: int) -> jax.Array:
    """The same columns for both rows that `decay_lib.join` puts together."""
    return ((self._differ >> (level + 1)) == 0) & (
      (self.column & (1 << level)) == 0
    )

  def choose(self, values: Sequence[jax.Array]) -> jax.Array:
    """[C, n C] of one [C, n C] or [C, 1] per head: each in its own lanes."""
    result = values[0]
    for index, value in enumerate(values[1:], 1):
      result = jnp.where(self.head == index, value, result)
    return result

  def fold(self, square: jax.Array) -> jax.Array:
    """The heads' own squares of [n C, n C], side by side."""
    return self.choose(self.split(square))

  def split(self, x: jax.Array) -> list[jax.Array]:
    """The rows of each head."""
    return jnp.split(x, len(self.heads))

  def spread(self, x: jax.Array) -> jax.Array:
    """[rows, n C] to [n rows, n C]: rows per head, zero in others' lanes."""
    if len(self.heads) == 1:
      return x
    head = self.head[: x.shape[0]]
    return _stack(
      [jnp.where(head == i, x, 0.0) for i in range(len(self.heads))]
    )

  def columns(self, x: jax.Array) -> list[jax.Array]:
    """[1, n C] to [C, 1] per head."""
    return [
      jnp.sum(
        jnp.where(self.diagonal & (self.head == index), x, 0.0),
        axis=1,
        keepdims=True,
      )
      for index in range(len(self.heads))
    ]

  def times(self, a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of [rows, n C] and [C, n C], head by head."""
    return self.dot(a, self.spread(b))

  def dot(
    self, a: jax.Array, b: jax.Array, b_axis: int = 0, a_axis: int = 1
  ) -> jax.Array:
    if not self.exact:
      a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return tpu_rows.dot(a, b, b_axis, a_axis, exact=self.exact)


class Saved(NamedTuple):
  """What the forward pass found in a chunk of n heads.

  Attributes:
    z: per head, [C, V] float32.
    starts: the state before the chunk of each head, [V, K].
    inverse: of the systems, [C, n C].
    keys: A of all heads, [C, n C].
    pairs: P of all heads, [C, n C].
  """

  z: list[jax.Array]
  starts: list[jax.Array]
  inverse: jax.Array
  keys: jax.Array
  pairs: jax.Array


def scores(c: Aside) -> tuple[jax.Array, jax.Array]:
  """A and P of all heads, [C, n C] float32."""
  # Registers of eight rows. A column's block is a whole register of rows.
  lane, row = (
    tpu_rows.iota((_BLOCK, c.size * len(c.heads)), axis) for axis in (1, 0)
  )
  column = lane & (_BLOCK - 1)
  block = (lane & (c.size - 1)) >> decay_lib.num_levels(_BLOCK)
  diagonal = [jnp.sum(h.q * h.k, axis=1, keepdims=True) for h in c.heads]
  pairs = [
    jnp.where(column == row, x, 0.0) for x in _blocks(c.choose(diagonal))
  ]
  keys = [jnp.zeros_like(x) for x in pairs]
  for level in range(c.levels):
    size = 1 << level
    rows, columns = zip(*(h.rows(level) for h in c.heads))
    square = c.fold(c.dot(_stack(rows), _stack(columns), 1))
    new_keys = _blocks(square)
    new_pairs = _blocks(decay_lib.unjoin(square, size))
    # In the columns of all blocks alike: other blocks' are cleared below.
    mask = (((row ^ column) >> level) == 1) & (row > column)
    for index in range(len(keys)):
      if size >= _BLOCK:
        late = index * _BLOCK // size
        if late % 2 == 0:
          continue
        # Columns before those of this level will be those of higher levels.
        mask = block < late * size // _BLOCK
      keys[index] = jnp.where(mask, new_keys[index], keys[index])
      pairs[index] = jnp.where(mask, new_pairs[index], pairs[index])
    if 2 * size == _BLOCK:
      keys, pairs = (
        [jnp.where(block == i, x, 0.0) for i, x in enumerate(registers)]
        for registers in (keys, pairs)
      )
  return _stack(keys), _stack(pairs)


def inverses(groups: list[Aside], keys: list[jax.Array]) -> list[jax.Array]:
  """Inverses of I + A diag(beta), [C, n C] float32, all groups in lockstep."""
  systems = [x * c.beta for c, x in zip(groups, keys)]
  solved = [_blocks_inverse(c, x) for c, x in zip(groups, systems)]
  for level in range(decay_lib.num_levels(_BLOCK), groups[0].levels):
    size = 1 << level
    late = [decay_lib.late_rows(x, size) for x in solved]
    halves = [
      c.times(x, jnp.where(c.mask(level), system, 0.0))
      for c, x, system in zip(groups, late, systems)
    ]
    late = [
      x - c.times(half, inverse)
      for c, x, half, inverse in zip(groups, late, halves, solved)
    ]
    solved = [
      decay_lib.with_late_rows(x, rows, size) for x, rows in zip(solved, late)
    ]
  if groups[0].exact:
    return solved
  # One Newton step squares the error of the products in bfloat16.
  solved = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in solved]
  products = [
    c.times(jnp.concatenate(_split(system, 2), axis=0), x)
    for c, system, x in zip(groups, systems, solved)
  ]
  rests = [
    jnp.where(c.diagonal, 1.0, 0.0) - x - product[: c.size] - product[c.size :]
    for c, x, product in zip(groups, solved, products)
  ]
  return [x + c.times(x, rest) for c, x, rest in zip(groups, solved, rests)]


def gradients(
  c: Aside, saved: Saved, do: list[jax.Array], dstates: list[jax.Array]
) -> tuple[Any, ...]:
  """Gradients of one group, given the gradients of its outputs and last states.

  These are `do` and `dstates`, [C, V] and [V, K] float32 for each head.

  Returns:
    Lists per head of the gradients of the scaled q, of k, of v, of g and of the
    first states, and that of beta, [1, n C].
  """
  heads, z = c.heads, saved.z
  columns = c.columns(c.beta)
  inverse = c.spread(saved.inverse)
  dwritten = c.split(c.dot(c.spread(saved.pairs), _stack(do), 0, 0))
  dwritten = [
    x + c.dot(h.k_out, dstate, 1)
    for x, h, dstate in zip(dwritten, heads, dstates)
  ]
  # Also the gradient of v.
  x = c.dot(inverse, _stack([b * w for b, w in zip(columns, dwritten)]), 0, 0)
  written = [b * y for b, y in zip(columns, z)]
  dpairs = c.fold(c.dot(_stack(do), _stack(written), 1))
  dsystem = -c.fold(c.dot(x, _stack(z), 1))
  x = c.split(x)
  diagonal = [
    jnp.sum(a * b, axis=1, keepdims=True) for a, b in zip(dwritten, z)
  ]
  keys = saved.keys.astype(jnp.float32)
  dbeta = jnp.sum(
    jnp.where(c.diagonal, c.choose(diagonal), 0.0)
    + jnp.where(c.below, dsystem * keys, 0.0),
    axis=0,
    keepdims=True,
  )
  dq, dk, dexponents, dtotals, dbefore = [], [], [], [], []
  for h, diagonal, x_, do_, y, start, dstate in zip(
    heads, c.columns(dpairs), x, do, written, saved.starts, dstates
  ):
    both = jnp.concatenate([-x_, do_], axis=0)
    dboth_in = c.dot(both, start)
    dk_in = dboth_in[: c.size] * h.carried
    dq_in = dboth_in[c.size :] * h.carried
    dk_out = c.dot(y, dstate) * h.left
    start = start.astype(jnp.float32)
    dtotals.append(
      h.chunk_decay * jnp.sum(start * dstate, axis=0, keepdims=True)
    )
    dbefore.append(
      h.chunk_decay * dstate + c.dot(both, _stack([h.k_in, h.q_in]), 0, 0)
    )
    dq.append(dq_in + diagonal * h.k)
    dk.append(dk_in + dk_out + diagonal * h.q)
    # A decay enters only through its product with q or k, so the gradient of
    # its exponent is the gradient of that product times q or k.
    dexponents.append([h.q * dq_in + h.k * dk_in, h.k * dk_out])
  dkeys = dsystem * c.beta
  for level in reversed(range(c.levels)):
    size = 1 << level
    dsquare = decay_lib.join(dpairs, dkeys, size)
    dsquare = c.spread(jnp.where(c.joined_mask(level), dsquare, 0.0))
    rows, keys = zip(*(h.rows(level) for h in heads))
    drows = c.split(c.dot(dsquare, _stack(keys)))
    dcolumns = c.split(c.dot(dsquare, _stack(rows), 0, 0))
    for i, h in enumerate(heads):
      decay = h.decays[level]
      dk_here = decay_lib.select(dcolumns[i], drows[i], size) * decay
      dq_here = decay_lib.unjoin(drows[i], size) * decay
      dq_here = decay_lib.select(jnp.zeros_like(dq_here), dq_here, size)
      dq[i] += dq_here
      dk[i] += dk_here
      dexponents[i].insert(0, h.q * dq_here + h.k * dk_here)
  dg = [
    decay_lib.exponents_gradient(sums) + dtotal
    for sums, dtotal in zip(dexponents, dtotals)
  ]
  return dq, dk, x, dg, dbefore, dbeta


def _blocks_inverse(c: Aside, system: jax.Array) -> jax.Array:
  """Inverses of the diagonal blocks of eight tokens, by substitution.

  One register holds row r of every block in its row r, and eight lanes per
  block: rows are eliminated one after the other, in all blocks at once.
  """
  blocks = c.column >> decay_lib.num_levels(_BLOCK)
  parts = [slice(i, i + _BLOCK) for i in range(0, c.size, _BLOCK)]
  zeros = jnp.zeros_like(system[:_BLOCK])
  below = zeros
  for index, part in enumerate(parts):
    below = jnp.where(blocks[part] == index, system[part], below)
  lane = tpu_rows.iota(zeros.shape, 1)
  solved = jnp.where(
    tpu_rows.iota(zeros.shape, 0) == (lane & (_BLOCK - 1)), 1.0, 0.0
  )
  for row in range(_BLOCK - 1):
    factor = jnp.take_along_axis(below, (lane & -_BLOCK) + row, axis=1)
    solved -= factor * solved[row : row + 1]
  return _stack(
    [
      jnp.where(blocks[part] == index, solved, 0.0)
      for index, part in enumerate(parts)
    ]
  )


def _blocks(x: jax.Array) -> list[jax.Array]:
  return [x[i : i + _BLOCK] for i in range(0, x.shape[0], _BLOCK)]


def _split(x: jax.Array, terms: int) -> list[jax.Array]:
  """Bfloat16 terms whose sum is x to about 8 bits per term."""
  parts = []
  for _ in range(terms):
    parts.append(x.astype(jnp.bfloat16))
    x = x - parts[-1].astype(jnp.float32)
  return parts


def _stack(arrays: Sequence[jax.Array]) -> jax.Array:
  return jnp.concatenate(arrays, axis=0)
