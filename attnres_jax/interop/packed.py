# SPDX-License-Identifier: Apache-2.0
"""How likely a network finds the ends of many texts, several in a row.

A batch has B rows of T tokens, T being one of a few lengths, so few programs
are compiled. A row holds several texts, which their segment ids keep apart:
attention stays inside them, and recurrent states begin anew. Texts that differ
in their last token only, such as the choices of one question, are computed
once. The head is applied to the tokens before those that are scored, a few at
a time.

Where a scheme looks back at earlier tokens by itself, across documents (such as
the convolutions of xHC), a row holds one text.

All processes have to call it with the same texts; each computes its rows.
"""

import bisect
import collections
from collections.abc import Iterable, Sequence
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import loss as loss_lib
from attnres_jax import models
from attnres_jax import sharding
from attnres_jax.config import fields

# Fewer tokens are padded to so many, likewise scored ones per row, and choices.
_LEAST_LENGTH, _LEAST_PLACES, _LEAST_CHOICES = 64, 16, 4


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


class _Unit(NamedTuple):
  """Inputs that are computed once.

  Attributes:
    inputs: tokens.
    ends: the texts that have them: its number, its count and its last token.
    count: the largest of their counts.
  """

  inputs: tuple[int, ...]
  ends: tuple[tuple[int, int, int], ...]
  count: int


class _Place(NamedTuple):
  """Where a unit begins in a batch."""

  unit: _Unit
  row: int
  start: int


class Scorer:
  """Scores texts with a network on a mesh.

  Attributes:
    length: most inputs of a text.
    programs: (B, T, places, choices) of each program that was compiled.
  """

  def __init__(
    self,
    mesh: jax.sharding.Mesh,
    *,
    length: int,
    batch_tokens: int = 8192,
  ):
    """Nothing is compiled yet.

    Args:
      mesh: over which its parameters and the rows are sharded.
      length: most inputs of a text.
      batch_tokens: of one batch, if its rows are not longer.

    Raises:
      ConfigError: a number cannot be used.
    """
    fields.accept("--length", length, fields.Tokens)
    fields.accept("--batch_tokens", batch_tokens, fields.Size)
    self.length = length
    self.programs: set[tuple[int, int, int, int]] = set()
    self._mesh = mesh
    self._batch_tokens = batch_tokens
    self._score = jax.jit(self._scores, out_shardings=sharding.replicated(mesh))

  def __call__(
    self, model: models.Transformer, texts: Sequence[Text]
  ) -> list[Found]:
    """The scores, in the order of the texts.

    Raises:
      ValueError: a text is too long, too short, or has no token to score.
    """
    for text in texts:
      if not 1 <= text.count < len(text.ids) <= self.length + 1:
        raise ValueError(
          f"{text.count} of {len(text.ids)} tokens: expected one or more, after"
          f" at least one other, and at most {self.length + 1} in all"
        )
    found: list[Any] = [None] * len(texts)
    packs = not model.looks_back
    for places, length, rows in self._batches(_units(texts), packs):
      arrays = self._arrays(places, length, rows)
      logprob_BPK, best_BP = jax.device_get(self._score(model, *arrays))
      used = collections.Counter()
      for unit, row, _ in places:
        stop = used[row] = used[row] + unit.count
        logprobs = logprob_BPK[row, stop - unit.count : stop].astype(np.float64)
        best = best_BP[row, stop - unit.count : stop]
        for k, (number, count, last) in enumerate(unit.ends):
          target = [*unit.inputs[1:], last][-count:]
          each = [*logprobs[-count:-1, 0], logprobs[-1, k]]
          greedy = best[-count:].tolist() == target
          found[number] = Found(math.fsum(each), greedy)
    return found

  def _batches(
    self, units: Iterable[_Unit], packs: bool
  ) -> Iterable[tuple[list[_Place], int, int]]:
    """Places of units in batches; the length and number of their rows.

    A batch is as long as its longest unit needs. Rows are filled with the
    longest units that still fit.
    """
    waiting: dict[int, list[_Unit]] = {}
    for unit in units:
      waiting.setdefault(len(unit.inputs), []).append(unit)
    sizes = sorted(waiting)
    unit_rows = sharding.num_row_shards(self._mesh)
    tensor = self._mesh.shape[sharding.TENSOR]
    while sizes:
      length = _bucket(sizes[-1], _LEAST_LENGTH, self.length)
      length += -length % tensor
      rows = max(1, self._batch_tokens // (length * unit_rows)) * unit_rows
      places = []
      for row in range(rows):
        start = 0
        while sizes and (packs or not start):
          at = bisect.bisect_right(sizes, length - start) - 1
          if at < 0:
            break
          size = sizes[at]
          places.append(_Place(waiting[size].pop(), row, start))
          if not waiting[size]:
            del sizes[at]
          start += size
      yield places, length, rows

  def _arrays(
    self, places: Sequence[_Place], length: int, rows: int
  ) -> list[jax.Array]:
    """Tokens, segment ids, places to score and their targets, on the mesh."""
    tokens_BT, segments_BT = np.zeros((2, rows, length), np.int32)
    counts = collections.Counter()
    for unit, row, _ in places:
      counts[row] += unit.count
    most = max(len(unit.ends) for unit, _, _ in places)
    size = _bucket(max(counts.values()), _LEAST_PLACES, length, 2)
    choices = _bucket(most, _LEAST_CHOICES, 4**8, 2)
    where_BP = np.zeros((rows, size), np.int32)
    target_BPK = np.zeros((rows, size, choices), np.int32)
    used = collections.Counter()
    segments = collections.Counter()
    for unit, row, start in places:
      segments[row] += 1
      stop = start + len(unit.inputs)
      tokens_BT[row, start:stop] = unit.inputs
      segments_BT[row, start:stop] = segments[row]
      first, last = used[row], used[row] + unit.count
      where_BP[row, first:last] = np.arange(stop - unit.count, stop)
      target_BPK[row, first : last - 1, 0] = unit.inputs[
        len(unit.inputs) - unit.count + 1 :
      ]
      ends = [end[2] for end in unit.ends]
      target_BPK[row, last - 1, : len(ends)] = ends
      used[row] = last
    self.programs.add((rows, length, size, choices))
    place = sharding.batch_sharding(self._mesh)
    return [
      jax.make_array_from_callback(a.shape, place, lambda index, a=a: a[index])
      for a in (tokens_BT, segments_BT, where_BP, target_BPK)
    ]

  def _scores(self, model, tokens_BT, segments_BT, where_BP, target_BPK):
    """Log-probabilities [B, P, K] of targets, and the best tokens [B, P]."""
    with sharding.ambient(self._mesh):
      h_BTD = model.hidden(tokens_BT, segments_BT)
      h_BPD = jnp.take_along_axis(h_BTD, where_BP[..., None], axis=1)
      rows, size, _ = h_BPD.shape
      local = rows // sharding.num_row_shards(self._mesh)
      row_bytes = 4 * local * model.config.vocab_size
      tile = max(1, min(size, loss_lib.TILE_BYTES // row_bytes))
      tile = 1 << (tile.bit_length() - 1)
      pad = -size % tile

      def tiles(a):
        a = jnp.pad(a, [(0, 0), (0, pad)] + [(0, 0)] * (a.ndim - 2))
        a = a.reshape(rows, -1, tile, *a.shape[2:])
        return jnp.moveaxis(a, 1, 0)

      def one(xs):
        h_BPD, target_BPK = xs
        logits_BPV = model.embedding.decode(h_BPD)
        chosen = jnp.take_along_axis(logits_BPV, target_BPK, axis=-1)
        norm = jax.nn.logsumexp(logits_BPV, axis=-1, keepdims=True)
        best_BP = jnp.argmax(logits_BPV, axis=-1).astype(jnp.int32)
        return chosen - norm, best_BP

      found = jax.lax.map(one, (tiles(h_BPD), tiles(target_BPK)))

      def joined(a):
        a = jnp.moveaxis(a, 0, 1)
        return a.reshape(rows, -1, *a.shape[3:])[:, :size]

      return jax.tree.map(joined, found)


def _units(texts: Sequence[Text]) -> list[_Unit]:
  """Texts with the same inputs together, in an order that only they decide."""
  groups: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
  for number, text in enumerate(texts):
    end = number, text.count, text.ids[-1]
    groups.setdefault(text.ids[:-1], []).append(end)
  return [
    _Unit(inputs, tuple(ends), max(count for _, count, _ in ends))
    for inputs, ends in sorted(groups.items())
  ]


def _bucket(size: int, least: int, most: int, bits: int = 1) -> int:
  """The next size of a program, 2**bits times the one before.

  Not above `most`, unless `size` is.
  """
  steps = max(0, -(-(size - 1).bit_length() // bits))
  return min(max(least, 1 << (bits * steps)), max(most, size))
