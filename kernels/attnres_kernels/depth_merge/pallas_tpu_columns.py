# SPDX-License-Identifier: Apache-2.0
"""Sums over the slices of heads and back, in registers of 128 columns.

A register that one head owns is summed along its lanes. If several share it,
each sums what a mask leaves. The sums of all heads are columns of one array
[rows, H], so that weights are computed for all heads at once.
"""

import jax
import jax.numpy as jnp

_LANES = 128


class Columns:
  """Of one call.

  Attributes:
    heads: H.
    key_width: that of keys, in the mean of their squares.
  """

  def __init__(self, width: int, heads: int, rank: int | None):
    self.heads = heads
    self.key_width = width if rank is None else rank
    self._width, self._slice = width, width // heads

  def vectors(
    self, query_D: jax.Array, gain_D: jax.Array | None
  ) -> list[jax.Array]:
    """The operands [1, D]; a query is zero in front of the key."""
    front = self._width - self.key_width
    if front:
      query_D = jnp.pad(query_D, (front, 0))
    return [x[None] for x in (query_D, gain_D) if x is not None]

  def only_keys(self, x: jax.Array) -> jax.Array:
    """Zero in front of the key."""
    front = self._width - self.key_width
    if not front:
      return x
    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where(column >= front, x, 0.0)

  def sums(self, x: jax.Array) -> jax.Array:
    """Of each slice: [rows, D] to [rows, H]."""
    if self.heads == 1:
      return jnp.sum(x, axis=1, keepdims=True)
    rows = x.shape[0]
    place = jax.lax.broadcasted_iota(jnp.int32, (rows, self.heads), 1)
    result = jnp.zeros((rows, self.heads), jnp.float32)
    for head in range(self.heads):
      total = sum(
        jnp.sum(self._owned(x[:, part], part, head), axis=1, keepdims=True)
        for part in self._registers(head)
      )
      result = jnp.where(place == head, total, result)
    return result

  def spread(self, x: jax.Array) -> jax.Array:
    """[rows, H] to the columns of each slice [rows, D]."""
    if self.heads == 1:
      return x
    parts = []
    for start in range(0, self._width, _LANES):
      stop = min(start + _LANES, self._width)
      first, last = start // self._slice, (stop - 1) // self._slice
      shape = x.shape[0], stop - start
      column = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + start
      part = jnp.broadcast_to(x[:, first : first + 1], shape)
      for head in range(first + 1, last + 1):
        of_head = jnp.broadcast_to(x[:, head : head + 1], shape)
        part = jnp.where(column >= head * self._slice, of_head, part)
      parts.append(part)
    return jnp.concatenate(parts, axis=1)

  def _registers(self, head: int) -> list[slice]:
    """The registers that a slice overlaps; full ones are together."""
    first, last = head * self._slice, (head + 1) * self._slice
    start, stop = first // _LANES * _LANES, -(-last // _LANES) * _LANES
    inner = -(-first // _LANES) * _LANES, last // _LANES * _LANES
    cuts = sorted({start, *(c for c in inner if start < c < stop), stop})
    return [slice(a, min(b, self._width)) for a, b in zip(cuts, cuts[1:])]

  def _owned(self, x: jax.Array, part: slice, head: int) -> jax.Array:
    first, last = head * self._slice, (head + 1) * self._slice
    if first <= part.start and part.stop <= last:
      return x
    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) + part.start
    return jnp.where((column >= first) & (column < last), x, 0.0)
