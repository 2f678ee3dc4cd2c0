# SPDX-License-Identifier: Apache-2.0
"""How likely a network finds the ends of many texts.

A batch has B rows of T tokens. T is one of a few lengths, so that few programs
are compiled. Texts that differ in their last token only, such as the choices of
one question, share a row. The head is applied to a tile of tokens at a time.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import models
from attnres_jax.common import sharding
from attnres_jax.config import fields
from attnres_jax.models import loss as loss_lib

# Smaller numbers of tokens and of choices are padded to these.
_LEAST_LENGTH, _LEAST_CHOICES = 64, 4


class Text(NamedTuple):
  """What is scored.

  Attributes:
    ids: of a context, then of its end.
    count: how many of the last ids are scored, fewer than all.
  """

  ids: tuple[int, ...]
  count: int


class Found(NamedTuple):
  """The score of the end of a text.

  Attributes:
    logprob: natural logarithm of its probability after the context, summed over
      tokens in float64.
    greedy: whether each of its tokens is the most likely one.
  """

  logprob: float
  greedy: bool


@dataclasses.dataclass(eq=False)
class Scorer:
  """Scores texts with a network on a mesh; refuses numbers out of range.

  Attributes:
    mesh: over which parameters and rows are sharded.
    length: most inputs of a text.
    batch_tokens: of one batch, if its rows are not longer.
  """

  mesh: jax.sharding.Mesh
  length: int
  batch_tokens: int = 8192

  def __post_init__(self):
    fields.accept("--length", self.length, fields.Size)
    fields.accept("--batch_tokens", self.batch_tokens, fields.Size)
    # (B, T, choices) of each program that was compiled.
    self.programs: set[tuple[int, int, int]] = set()
    self._score = jax.jit(self._scores)

  def __call__(
    self, model: models.Transformer, texts: Sequence[Text]
  ) -> list[Found]:
    """The scores, in the order of the texts.

    Raises:
      ValueError: a text is too long, too short, or has no token to score.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, text in enumerate(texts):
      if not 1 <= text.count < len(text.ids) <= self.length + 1:
        raise ValueError(
          f"{text.count} of {len(text.ids)} tokens: expected one or more, after"
          f" at least one other, and at most {self.length + 1} in all"
        )
      groups.setdefault(text.ids[:-1], []).append(number)
    found: list[Any] = [None] * len(texts)
    shards = sharding.num_row_shards(self.mesh)
    # In an order that depends on the texts alone, the longest first.
    waiting = sorted(groups, key=lambda inputs: (-len(inputs), inputs))
    while waiting:
      length = _bucket(len(waiting[0]), _LEAST_LENGTH, 1)
      length = max(min(length, self.length), len(waiting[0]))
      length += -length % self.mesh.shape[sharding.TENSOR]
      rows = max(1, self.batch_tokens // (length * shards)) * shards
      batch, waiting = waiting[:rows], waiting[rows:]
      most = max(len(groups[inputs]) for inputs in batch)
      tokens_BT, target_BT = np.zeros((2, rows, length), np.int32)
      choice_BK = np.zeros((rows, _bucket(most, _LEAST_CHOICES, 2)), np.int32)
      last_B = np.zeros(rows, np.int32)
      for row, inputs in enumerate(batch):
        last_B[row] = len(inputs) - 1
        tokens_BT[row, : len(inputs)] = inputs
        target_BT[row, : len(inputs) - 1] = inputs[1:]
        ends = [texts[number].ids[-1] for number in groups[inputs]]
        choice_BK[row, : len(ends)] = ends
      self.programs.add((rows, length, choice_BK.shape[1]))
      arrays = jax.device_put(
        (tokens_BT, target_BT, last_B, choice_BK),
        sharding.batch_sharding(self.mesh),
      )
      scores = jax.device_get(self._score(model, *arrays))
      logprob_BT, best_BT, last_BK = scores
      for row, inputs in enumerate(batch):
        end = len(inputs)
        for k, number in enumerate(groups[inputs]):
          ids, count = texts[number]
          each = [*logprob_BT[row, end - count : end - 1], last_BK[row, k]]
          greedy = best_BT[row, end - count : end].tolist() == [*ids[-count:]]
          found[number] = Found(math.fsum(map(float, each)), greedy)
    return found

  def _scores(
    self,
    model: models.Transformer,
    tokens_BT: jax.Array,
    target_BT: jax.Array,
    last_B: jax.Array,
    choice_BK: jax.Array,
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scores of the next tokens [B, T], the best ones, of last ones [B, K]."""
    with sharding.ambient(self.mesh):
      h_BTD = model.hidden(tokens_BT)
      rows, length, _ = h_BTD.shape
      local = rows // sharding.num_row_shards(self.mesh)
      tile = loss_lib.TILE_BYTES // (4 * local * model.config.vocab_size)
      tile = min(length, max(1, tile))

      def logprobs(xs):
        h_BCD, chosen_BCK = xs
        logits_BCV = model.embedding.decode(h_BCD)
        chosen = jnp.take_along_axis(logits_BCV, chosen_BCK, axis=-1)
        norm = jax.nn.logsumexp(logits_BCV, axis=-1, keepdims=True)
        best_BC = jnp.argmax(logits_BCV, axis=-1).astype(jnp.int32)
        return chosen - norm, best_BC

      found = jax.lax.map(
        logprobs, loss_lib.cut(tile, h_BTD, target_BT[..., None])
      )
      logprob_BT, best_BT = (
        jnp.moveaxis(a, 0, 1).reshape(rows, -1)[:, :length] for a in found
      )
      h_B1D = jnp.take_along_axis(h_BTD, last_B[:, None, None], axis=1)
      last_B1K, _ = logprobs((h_B1D, choice_BK[:, None]))
      return logprob_BT, best_BT, last_B1K[:, 0]


def _bucket(size: int, least: int, bits: int) -> int:
  """The next size of a program, 2**bits times the one before."""
  steps = -(-(size - 1).bit_length() // bits)
  return max(least, 1 << (bits * steps))
