# SPDX-License-Identifier: Apache-2.0
"""Draws the next token of every row, each by its own settings.

In this order: the temperature, `top_k`, `top_p`; then one draw, whose random
numbers depend on the seed of the row, the number of its text (`stream`) and the
position of the token only. So a request draws the same tokens whatever shares
its batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from attnres_jax.common import draws
from attnres_jax.inference.settings import Settings as Settings


class Rows(NamedTuple):
  """The `Settings` of B rows, [B] each: float32, int32, float32 and uint32.

  `stream` [B], uint32, is the number of the text, of all with this seed.
  """

  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  seed: jax.Array
  stream: jax.Array

  @classmethod
  def empty(cls, batch: int) -> "Rows":
    """B rows with the default settings."""
    float_B, uint_B = jnp.ones(batch, jnp.float32), jnp.zeros(batch, jnp.uint32)
    return cls(float_B, jnp.zeros(batch, jnp.int32), float_B, uint_B, uint_B)

  def greedy_unless(self, drawn_B: jax.Array) -> "Rows":
    """Settings that are greedy in rows that draw nothing: it costs least."""
    temperature = jnp.where(drawn_B, self.temperature, 0.0)
    return self._replace(temperature=temperature)


class Drawn(NamedTuple):
  """One token of every row, int32, and its log-probability, float32.

  The latter is by the network, without settings.
  """

  token_B: jax.Array
  logprob_B: jax.Array


def draw(logits_BV: jax.Array, rows: Rows, position_B: jax.Array) -> Drawn:
  """Draws the token of every row that is at `position_B` in its sequence."""
  logprob_BV = jax.nn.log_softmax(logits_BV)
  greedy_B = _highest(logits_BV)
  # Most batches need no sorting, and many no random numbers.
  drawn_B = jax.lax.cond(
    jnp.any(rows.temperature > 0),
    lambda: _random(logits_BV, rows, position_B),
    lambda: greedy_B,
  )
  token_B = jnp.where(rows.temperature > 0, drawn_B, greedy_B)
  token_B = token_B.astype(jnp.int32)
  logprob_B1 = jnp.take_along_axis(logprob_BV, token_B[:, None], axis=1)
  return Drawn(token_B, logprob_B1[:, 0])


# On CPU, XLA computes an argmax one entry at a time.
def _highest(logits_BV):
  """The first of the highest entries of each row."""
  vocab_size = logits_BV.shape[-1]
  highest_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
  id_V = jnp.arange(vocab_size)[None]
  id_BV = jnp.where(logits_BV == highest_B1, id_V, vocab_size - 1)
  return jnp.min(id_BV, axis=-1)


def _random(logits_BV, rows, position_B):
  temperature_B = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
  logits_BV = logits_BV / temperature_B[:, None]
  cuts = (rows.top_k > 0) | (rows.top_p < 1)
  cuts &= rows.temperature > 0
  logits_BV = jax.lax.cond(
    jnp.any(cuts), lambda: _cut(logits_BV, rows), lambda: logits_BV
  )

  def draw_row(logits_V, seed, stream, position):
    key = jax.random.fold_in(draws.key(seed), stream)
    key = jax.random.fold_in(key, position)
    return jax.random.categorical(key, logits_V)

  with draws.reproducible():
    return jax.vmap(draw_row)(logits_BV, rows.seed, rows.stream, position_B)


def _cut(logits_BV, rows):
  """-inf for tokens outside of `top_k` or `top_p`; ties stay."""
  sorted_BV = jnp.flip(jnp.sort(logits_BV, axis=-1), axis=-1)
  rank_V = jnp.arange(logits_BV.shape[-1])
  top_k_B = jnp.where(rows.top_k > 0, rows.top_k, rank_V.size)
  sorted_BV = jnp.where(rank_V[None] < top_k_B[:, None], sorted_BV, -jnp.inf)
  p_BV = jax.nn.softmax(sorted_BV)
  # What is more likely than a token: it stays while that is not yet enough.
  before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
  stays_BV = (before_BV < rows.top_p[:, None]) | (rank_V == 0)[None]
  # Rounded sums reach one before the last tokens.
  stays_BV |= (rows.top_p >= 1)[:, None]
  stays_BV &= sorted_BV > -jnp.inf
  least_B1 = jnp.min(
    jnp.where(stays_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True
  )
  return jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
