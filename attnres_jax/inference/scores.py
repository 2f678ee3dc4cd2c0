# SPDX-License-Identifier: Apache-2.0
"""How likely the network finds the tokens of a prompt.

The head is applied to a few tokens at a time, so the logits of a whole chunk
are never in memory.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import models

# Ids and log-probabilities of the most likely tokens.
Top = tuple[tuple[int, float], ...]
# Tokens of each row whose logits are in memory at once.
_AT_ONCE = 16


class Score(NamedTuple):
  """Of one token.

  Attributes:
    logprob: its log-probability, given the tokens before it.
    top: the most likely tokens in its place.
  """

  logprob: float
  top: Top


class Scores(NamedTuple):
  """Of the tokens that follow each token of a chunk.

  Attributes:
    logprob_BT: float32.
    top_BTK: int32, the most likely tokens.
    top_logprob_BTK: float32, their log-probabilities.
  """

  logprob_BT: jax.Array | np.ndarray
  top_BTK: jax.Array | np.ndarray
  top_logprob_BTK: jax.Array | np.ndarray


def score(
  model: models.Transformer,
  hidden_BTD: jax.Array,
  next_BT: jax.Array,
  num_top: int,
) -> Scores:
  """Scores the token after each of a chunk.

  Args:
    model: whose head is used.
    hidden_BTD: what the head reads.
    next_BT: the tokens that follow.
    num_top: K, how many of the most likely tokens are listed.
  """

  def of_place(place):
    h_BD, next_B = place
    logits_BV = model.embedding.decode(h_BD[:, None])[:, 0]
    logprob_BV = jax.nn.log_softmax(logits_BV)
    top_logprob_BK, top_BK = jax.lax.top_k(logprob_BV, max(num_top, 1))
    logprob_B1 = jnp.take_along_axis(logprob_BV, next_B[:, None], axis=1)
    return Scores(logprob_B1[:, 0], top_BK, top_logprob_BK)

  places = jnp.moveaxis(hidden_BTD, 1, 0), jnp.moveaxis(next_BT, 1, 0)
  found = jax.lax.map(of_place, places, batch_size=_AT_ONCE)
  logprob_BT, *top = (jnp.moveaxis(a, 0, 1) for a in found)
  # `map` cannot return empty arrays.
  return Scores(logprob_BT, *(a_BTK[..., :num_top] for a_BTK in top))


def to_list(scores: Scores, row: int, count: int) -> list[Score]:
  """The first scores of a row, as Python's numbers."""
  logprobs = scores.logprob_BT[row, :count].tolist()
  ids = scores.top_BTK[row, :count].tolist()
  values = scores.top_logprob_BTK[row, :count].tolist()
  return [
    Score(logprob, tuple(zip(*top)))
    for logprob, *top in zip(logprobs, ids, values)
  ]
