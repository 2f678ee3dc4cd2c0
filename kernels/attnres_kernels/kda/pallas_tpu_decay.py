# SPDX-License-Identifier: Apache-2.0
"""The decays of one chunk along its tree, on the vector unit of a TPU.

Rows are tokens, lanes are channels; a register holds eight rows. Level l of the
tree joins blocks of s = 2^l tokens in pairs, an early and a late one. A row's
partner is the row s away in the other block, `row ^ s`.

All exponents are sums of log-decays that are built along the tree, never a
difference of longer sums, so none is above 0 and a reset loses no precision
elsewhere. Rows are moved inside a register by rotations, which occupy the
otherwise idle transpose unit; from eight tokens on, a block is whole registers
and nothing has to move.
"""

from collections.abc import Sequence

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

# Rows of a register.
_ROWS = 8


def num_levels(size: int) -> int:
  return size.bit_length() - 1


def exponents(g: jax.Array) -> list[jax.Array]:
  """Sums of log-decays of a chunk, g [C, K] float32.

  Returns:
    levels + 2 arrays [C, K]. One per level: for a token of the late block, the
    sum from that block's start up to the token; for one of the early block, the
    sum from after the token to that block's end. Then the sum from the chunk's
    start up to each token, and that from after each token to the chunk's end.
  """
  total, prefix, suffix = g, g, jnp.zeros_like(g)
  sums = []
  size = 1
  while size < min(_ROWS, g.shape[0]):
    late = is_late(g.shape, size)
    sums.append(jnp.where(late, prefix, suffix))
    other = _partner(total, size)
    prefix += jnp.where(late, other, 0.0)
    suffix += jnp.where(late, 0.0, other)
    total += other
    size *= 2
  # All rows of a register in `total` are now equal: one per block is enough.
  totals, prefix, suffix = (_registers(x) for x in (total, prefix, suffix))
  while size < g.shape[0]:
    late, other = _blocks(len(prefix), size)
    sums.append(
      jnp.concatenate(
        [p if is_late else s for p, s, is_late in zip(prefix, suffix, late)]
      )
    )
    for i, is_later in enumerate(late):
      if is_later:
        prefix[i] += totals[other[i]]
      else:
        suffix[i] += totals[other[i]]
    totals = [a + b for a, b in zip(totals[::2], totals[1::2])]
    size *= 2
  return [*sums, jnp.concatenate(prefix), jnp.concatenate(suffix)]


def exponents_gradient(dsums: Sequence[jax.Array]) -> jax.Array:
  """The transpose of `exponents`: from the gradients of its results, dg."""
  *dsums, dprefix, dsuffix = dsums
  shape = dprefix.shape
  dprefix, dsuffix = _registers(dprefix), _registers(dsuffix)
  dtotals = [jnp.zeros_like(dprefix[0])]
  for level in reversed(range(num_levels(_ROWS), len(dsums))):
    late, other = _blocks(len(dprefix), 1 << level)
    dtotals = [dtotals[i // 2] for i in range(2 * len(dtotals))]
    dlevel = _registers(dsums[level])
    for i, is_later in enumerate(late):
      dsum = dprefix if is_later else dsuffix
      dtotals[other[i]] += dsum[i]
      dsum[i] += dlevel[i]
  dtotal, dprefix, dsuffix = (
    jnp.concatenate(x) for x in (dtotals, dprefix, dsuffix)
  )
  for level in reversed(range(num_levels(_ROWS))):
    late = is_late(shape, 1 << level)
    dother = dtotal + jnp.where(late, dprefix, dsuffix)
    dtotal += _partner(dother, 1 << level)
    dprefix += jnp.where(late, dsums[level], 0.0)
    dsuffix += jnp.where(late, 0.0, dsums[level])
  return dtotal + dprefix


def join(early: jax.Array, late: jax.Array, size: int) -> jax.Array:
  """Late rows of `late`, and partners' rows of `early` in the early rows.

  Two half-filled arrays in one, so that one product serves both.
  """
  if size < _ROWS:
    moved = _roll(early, _ROWS - size)
    return jnp.where(is_late(late.shape, size), late, moved)
  first, second = _registers(early), _registers(late)
  is_later, _ = _blocks(len(second), size)
  step = size // _ROWS
  return jnp.concatenate(
    [second[i] if b else first[i + step] for i, b in enumerate(is_later)]
  )


def unjoin(x: jax.Array, size: int) -> jax.Array:
  """The early rows of `x`, moved to their late partners; others undefined."""
  if size < _ROWS:
    return _roll(x, size)
  rows = _registers(x)
  is_later, _ = _blocks(len(rows), size)
  step = size // _ROWS
  return jnp.concatenate(
    [rows[i - step] if b else rows[i] for i, b in enumerate(is_later)]
  )


def select(early: jax.Array, late: jax.Array, size: int) -> jax.Array:
  """Rows of the early blocks from the one, of the late from the other."""
  if size < _ROWS:
    return jnp.where(is_late(late.shape, size), late, early)
  first, second = _registers(early), _registers(late)
  is_later, _ = _blocks(len(second), size)
  return jnp.concatenate(
    [second[i] if b else first[i] for i, b in enumerate(is_later)]
  )


def late_rows(x: jax.Array, size: int) -> jax.Array:
  """The rows of the late blocks alone, for blocks of whole registers."""
  rows = _registers(x)
  is_later, _ = _blocks(len(rows), size)
  return jnp.concatenate([row for row, b in zip(rows, is_later) if b])


def with_late_rows(x: jax.Array, late: jax.Array, size: int) -> jax.Array:
  """x, with its late rows replaced by the late rows of `late`."""
  rows, new = _registers(x), iter(_registers(late))
  is_later, _ = _blocks(len(rows), size)
  return jnp.concatenate(
    [next(new) if b else row for row, b in zip(rows, is_later)]
  )


def is_late(shape: tuple[int, ...], size: int) -> jax.Array:
  return (jax.lax.broadcasted_iota(jnp.int32, shape, 0) & size) != 0


def _blocks(number: int, size: int) -> tuple[list[bool], list[int]]:
  """Of each register: whether its block is a late one, and the other block."""
  blocks = [i * _ROWS // size for i in range(number)]
  return [b % 2 == 1 for b in blocks], [b ^ 1 for b in blocks]


def _registers(x: jax.Array) -> list[jax.Array]:
  return [x[i : i + _ROWS] for i in range(0, x.shape[0], _ROWS)]


def _partner(x: jax.Array, size: int) -> jax.Array:
  """Row t from row t ^ size, inside the registers."""
  if 2 * size == _ROWS:
    return _roll(x, size)
  late = is_late(x.shape, size)
  return jnp.where(late, _roll(x, size), _roll(x, _ROWS - size))


def _roll(x: jax.Array, shift: int) -> jax.Array:
  """Rotates the rows of each register: row t from row t - shift."""
  rows = x.reshape(-1, _ROWS, x.shape[-1])
  return pltpu.roll(rows, shift, 1).reshape(x.shape)
