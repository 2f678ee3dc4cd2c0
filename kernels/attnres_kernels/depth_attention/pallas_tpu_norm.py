# SPDX-License-Identifier: Apache-2.0
"""The norm of the first mixture in the backward pass of phase 1, on TPU.

With r = 1 / rms(mix), which the forward pass returns, h = gain * dnormed and
the weights w of the sources v of a token:

  dmix = r h - along mix         along = r^3 / D <h, mix>
  <dmix, v_m> = r <h, v_m> - along sum_n w_n <v_n, v_m>
  dv_m += w_m dmix = w_m r h - sum_n along w_m w_n v_n

So the mixture is not needed before the gradients of the sources. The products
of sources with each other, which also give their norms, are more columns of the
product with output gradients. The last sum is more columns of the factor of the
sources' gradients, and r mix, for the gain's gradient, is more rows of it.

Statistics of many groups of tokens lie side by side in the lanes of a register,
because every step of them waits for the one before: lane i of a group's segment
is query i, and then source i - Q.
"""

import jax
import jax.numpy as jnp

from attnres_kernels.depth_attention import pallas_tpu_tiles as tiles


def with_sources(douts, load):
  """Rows of the output gradients and then of the sources, by columns."""
  return lambda chunk: jnp.concatenate([douts(chunk), load(chunk)], axis=0)


class Segments:
  """How statistics of groups lie in lanes.

  Attributes:
    groups: how many, side by side.
  """

  def __init__(self, num_queries: int, num_slots: int):
    self.queries, self.slots = num_queries, num_slots
    self._bits = (num_queries + num_slots - 1).bit_length()
    self.size = 1 << self._bits
    self.groups = tiles.LANES >> self._bits

  def pack(self, x_QT: jax.Array, tile: int) -> jax.Array:
    """Statistics as an operand: [tiles, 8, packs * 128], padded with zeros."""
    num_queries, num_tokens = x_QT.shape
    x = tiles.stats_to_tiles(x_QT, tile)
    groups = tile // tiles.GROUP
    x = x.reshape(-1, num_queries, groups, tiles.GROUP)
    missing = -groups % self.groups
    x = jnp.pad(
      jnp.transpose(x, (0, 3, 2, 1)),
      ((0, 0), (0, 0), (0, missing), (0, self.size - num_queries)),
    )
    return x.reshape(*x.shape[:2], -1)

  def place(self, lane: jax.Array) -> jax.Array:
    """The lane within its segment."""
    return jnp.bitwise_and(lane, self.size - 1)

  def start(self, lane: jax.Array) -> jax.Array:
    return lane - self.place(lane)

  def side_by_side(self, parts: list[jax.Array]) -> jax.Array:
    """[rows, 128] from the segment of each group in its own array."""
    found = parts[0]
    segment = tiles.iota(found.shape, 1) >> self._bits
    for group, part in enumerate(parts[1:], 1):
      found = jnp.where(segment >= group, part, found)
    return found


class Statistics:
  """Of several groups: float32 [M*8, 128], lanes (group, query)."""

  def __init__(self, segments, products, num_terms, lse, dlse, inverse,
               key_inverses, columns, eps, exact):  # fmt: skip
    """Computes them.

    Args:
      segments: the layout.
      products: of each group's sources with partners: output gradients (of
        which the first is h), sources, `num_terms` query terms.
      num_terms: of each query.
      lse: [8, 128].
      dlse: [8, 128].
      inverse: of the rms of the first mixture; zero for padding: [8, 128].
      key_inverses: of the rms of keys [M*8, 1] of each group; None if the key
        is the whole source.
      columns: of the call.
      eps: of the norm of keys.
      exact: whether factors have one term.
    """
    self._segments, self._exact = segments, exact
    num_queries, num_slots = segments.queries, segments.slots
    place, start = segments.place, segments.start
    token = lambda row: jnp.bitwise_and(row, tiles.GROUP - 1)
    partners = num_queries + num_slots
    product = segments.side_by_side(
      [
        tiles.take_columns(
          x,
          lambda r, i: (
            jnp.minimum(place(i), partners - 1) * tiles.GROUP + token(r)
          ),
        )
        for x in products
      ]
    )
    score = segments.side_by_side(
      [
        tiles.total(
          tiles.take_columns(
            x,
            lambda r, i, t=term: (
              partners * tiles.GROUP
              + t * num_queries
              + jnp.minimum(place(i), num_queries - 1)
            ),
          )
          for term in range(num_terms)
        )
        for x in products
      ]
    )
    with_own = lambda r, i: start(i) + num_queries + (r >> tiles.GROUP_BITS)
    if key_inverses is None:
      square = tiles.take_columns(product, with_own)
      key_inverse = jax.lax.rsqrt(square * (1.0 / columns.width) + eps)
    else:
      key_inverse = segments.side_by_side(
        [jnp.broadcast_to(x, product.shape) for x in key_inverses]
      )
    # Without an eps, it is infinite in rows of padding, which are zero.
    key_inverse = tiles.on_slots(key_inverse)
    key_inverse = jnp.where(inverse[None] > 0.0, key_inverse, 0.0)
    score = tiles.on_slots(score) * key_inverse
    weight = jnp.exp(score - lse[None])
    # As without a norm, the weights are normalised again.
    weight = weight / jnp.sum(weight, axis=0)[None]
    flat = lambda x: x.reshape(-1, tiles.LANES)
    of_first = tiles.take_columns(flat(weight), lambda r, i: start(i))
    of_first = tiles.on_slots(of_first)
    with_mixture = jnp.sum(of_first * tiles.on_slots(product), axis=0)
    along = tiles.take_columns(with_mixture, lambda r, i: start(i))
    along = along * (inverse * inverse * inverse * (1.0 / columns.width))
    spread = jnp.broadcast_to(with_mixture[None], weight.shape)
    spread = tiles.on_slots(tiles.take_columns(flat(spread), with_own))
    at = place(tiles.iota(weight.shape, 2))
    product = tiles.on_slots(product)
    through = inverse[None] * product - along[None] * spread
    product = jnp.where(at == 0, through, product)
    mean = jnp.sum(weight * product, axis=0)
    dscore = weight * (product + (dlse - mean)[None])
    bends = flat(dscore * score)
    bend = tiles.total(
      tiles.take_columns(bends, lambda r, i, q=q: start(i) + q)
      for q in range(num_queries)
    )
    key_square = flat(key_inverse * key_inverse)
    self.bend = bend * key_square * (1.0 / columns.key_width)
    self.pull = flat(dscore * key_inverse)
    self._turned = jnp.transpose(flat(weight))
    # What the factor gathers: weights and, behind them, how a source's gradient
    # takes the mixture's part along itself; then, of the normalised mixture.
    weight = jnp.where(at == 0, weight * inverse[None], weight)
    weight = jnp.where(at == num_queries, -along[None] * of_first, weight)
    self._weight = flat(weight)
    self._normed = jnp.where(at[0] == num_queries, inverse, 0.0)
    # Pulls and, behind them, what a gradient loses of its own source.
    own = -self.bend if key_inverses is None else jnp.zeros_like(self.bend)
    at = place(tiles.iota(own.shape, 1))
    pull = jnp.where(at < num_queries, self.pull, 0.0)
    self._pull = jnp.where(at == num_queries, own, pull)

  def of_group(self, x: jax.Array, group: int, count: int) -> jax.Array:
    """Some columns of a group: [M*8, count]."""
    first = group * self._segments.size
    return tiles.take_columns(
      x, lambda r, i: jnp.minimum(first + i, tiles.LANES - 1), count
    )

  def factor(self, group: int) -> jax.Array:
    """Left operand of the source gradients [M*8 + 8, columns] of a group.

    Columns are the weights on the token diagonal (high terms, low terms), what
    multiplies sources on the diagonal (high, low), and the pulls (high, high,
    low); exact factors need one term each. Below are 8 rows of the normalised
    mixture.
    """
    num_queries, exact = self._segments.queries, self._exact
    start = group * self._segments.size
    diagonal, rows = num_queries * tiles.GROUP, self._weight.shape[0]
    terms = 1 if exact else 2
    sources = terms * diagonal
    pulls = sources + terms * rows
    columns = pulls + num_queries * (1 if exact else 3)
    turned = self._turned[start : start + 1]
    turned = jnp.broadcast_to(turned, (tiles.GROUP, rows))
    below = jnp.zeros((tiles.GROUP, tiles.LANES), jnp.float32)
    parts = []
    for first in range(0, columns, tiles.LANES):
      row, column = (tiles.iota((rows, tiles.LANES), axis) for axis in (0, 1))
      column += first
      of_group = column[: tiles.GROUP]
      at = column - sources
      at = jnp.clip(jnp.where(at < rows, at, at - rows), 0, rows - 1)
      on = tiles.on_diagonal(row, column)[: tiles.GROUP]
      part = jnp.zeros((rows + tiles.GROUP, tiles.LANES), jnp.float32)
      if first < pulls:
        query = jnp.where(column < diagonal, column, column - diagonal)
        taken_at = start + jnp.where(
          column < sources, query >> tiles.GROUP_BITS, num_queries
        )
        scale = jnp.ones_like(below)
        if first + tiles.LANES > sources:
          scale = tiles.take_columns(
            turned, lambda r, i, at=at: at[: tiles.GROUP]
          )
          scale = jnp.where(of_group < sources, 1.0, scale)
        scale = jnp.where(on & (of_group < pulls), scale, 0.0)
        taken = [
          tiles.take_columns(self._weight, lambda r, i, at=taken_at: at),
          tiles.take_columns(
            self._normed, lambda r, i, at=taken_at: at[: tiles.GROUP]
          ),
        ]
        taken = tiles.on_slots(jnp.concatenate(taken, axis=0))
        part = (taken * scale[None]).reshape(part.shape)
      if first + tiles.LANES > sources:
        query = column - pulls
        for _ in range(2):
          query = jnp.where(query >= num_queries, query - num_queries, query)
        own = at >> tiles.GROUP_BITS == row >> tiles.GROUP_BITS
        own &= (column >= sources) & tiles.on_diagonal(row, column)
        # The lane behind holds zeros.
        taken_at = jnp.where(own, num_queries, num_queries + 1)
        taken_at = start + jnp.where(column < pulls, taken_at, query)
        taken = tiles.take_columns(
          self._pull, lambda r, i, at=taken_at: jnp.minimum(at, tiles.LANES - 1)
        )
        part += jnp.concatenate([taken, below], axis=0)
      if not exact:
        high, low = tiles.high_and_low(part)
        column = tiles.iota(part.shape, 1) + first
        is_high = (
          (column < diagonal)
          | (column >= sources) & (column < sources + rows)
          | (column >= pulls) & (column < pulls + 2 * num_queries)
        )
        part = jnp.where(is_high, high, low).astype(jnp.bfloat16)
      parts.append(part)
    return jnp.concatenate(parts, axis=1)[:, :columns]
