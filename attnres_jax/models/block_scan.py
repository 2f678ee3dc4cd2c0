# SPDX-License-Identifier: Apache-2.0
"""One scan over depth blocks: a program whose sublayers do not grow with depth.

Each block of Block AttnRes has one more source than the last. Here the sources
are rows of one array [M, B, T, D], of which a block reads as many as there are,
a number known at run time only. A step of the scan runs as many blocks as it
takes for kinds of sublayers to repeat.

Autodiff of such a scan would save all rows once per block. So this module
defines the gradient. Rows are written once, and so the last array serves the
whole backward pass. Each block is differentiated by `jax.vjp`. The arrays that
it saves are stacked over the steps, except for the block's arguments (its
weights and the rows). Gradients of rows add up in an array that a reverse scan
carries.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnres_jax.common import precision
from attnres_jax.models import layer_stacks
from attnres_jax.models import segments
from attnres_jax.models.residuals import definition
from attnres_jax.models.residuals import depth_read


class Bank(NamedTuple):
  """Sources as rows of one array, in a scan over blocks.

  Attributes:
    rows_MBTD: the array.
    count: how many rows are sources, a number known at run time only.
  """

  rows_MBTD: jax.Array
  count: jax.Array


@dataclasses.dataclass(frozen=True)
class RowsOfScan(depth_read.TwoPhases):
  """Two phases whose sources are a `Bank`, by the definition of a read."""

  def _mixtures(self, query_QD, sources):
    # Kept for the backward pass: the rows, which are kept in any case.
    return jax.checkpoint(functools.partial(self._of_bank, query_QD))(sources)

  def _of_bank(
    self, query_QD: jax.Array, bank: Bank
  ) -> tuple[jax.Array, jax.Array]:
    """The definition, of the first rows of an array."""
    rows_MBTD, count = bank
    plain = dataclasses.replace(self.options, null="none")
    valid_M111 = jnp.arange(len(rows_MBTD))[:, None, None, None] < count

    def attend(query_D: jax.Array) -> tuple[jax.Array, jax.Array]:
      scores_MBTH = definition.score(plain, query_D, rows_MBTD, self.eps)
      scores_MBTH = jnp.where(valid_M111, scores_MBTH, -jnp.inf)
      weights_MBTD = definition.spread(
        definition.weigh(plain, scores_MBTH), rows_MBTD
      )
      out_BTD = jnp.sum(weights_MBTD * precision.widen(rows_MBTD), axis=0)
      lse_BTH = jax.nn.logsumexp(scores_MBTH, axis=0)
      if self._heads is None:
        lse_BTH = jnp.squeeze(lse_BTH, -1)
      return out_BTD.astype(rows_MBTD.dtype), lse_BTH

    outs, lses = zip(*map(attend, query_QD))
    return jnp.stack(outs), jnp.stack(lses)


Kinds = tuple[str, ...]
# Runs one block: maps its kinds, its sublayers and reads, the sources and the
# documents to the block representation.
RunBlock = Callable[[Kinds, Any, Bank, jax.Array | None], jax.Array]


def scan(
  run_block: RunBlock, blocks: layer_stacks.Run, sublayers: Mapping[str, Any],
  reads: definition.Read, sources: Sequence[jax.Array],
  segment_ids_BT: jax.Array | None,
) -> tuple[jax.Array, ...]:  # fmt: skip
  """Runs blocks: maps the sources before them to those after them.

  `run_block` must not use parameters other than its arguments. Blocks are as
  from `find`; sublayers have one stack per kind, in the order of depth.
  """
  first, num_blocks = len(sources), len(blocks.kinds)
  steps = jnp.arange(blocks.repeats)
  # For each block of a step, how to call its backward pass: the structure of
  # what it saves, and which of these arrays are given.
  backwards: dict[int, tuple[Any, list[int | None]]] = {}

  def split(weights: Any) -> list[Any]:
    """The weights of each block of a step."""
    sublayers, reads = weights
    layers = layer_stacks.in_order(
      sublayers, segments.sublayers_of(blocks).kinds
    )
    layers = map(layer_stacks.unsliced, layers)
    sizes = [len(kinds) for kinds in blocks.kinds]
    return [
      (list(itertools.islice(layers, size)), reads)
      for size, reads in zip(sizes, layer_stacks.split(reads, sizes))
    ]

  def count(step: jax.Array, block: int) -> jax.Array:
    return first + step * num_blocks + block

  @jax.custom_vjp
  def run(weights: Any, sources: Any, segment_ids_BT: Any) -> jax.Array:
    return forward(weights, sources, segment_ids_BT)[0]

  def forward(weights: Any, sources: Any, segment_ids_BT: Any) -> Any:
    more = jnp.zeros_like(sources[0], shape=(
      blocks.repeats * num_blocks, *sources[0].shape
    ))  # fmt: skip

    def step(rows_MBTD: jax.Array, xs: Any) -> Any:
      saved = []
      for i, weights in enumerate(split(xs[1])):
        given = weights, rows_MBTD, count(xs[0], i), segment_ids_BT

        def block(weights: Any, rows: Any, given=given, i=i) -> jax.Array:
          bank = Bank(rows, given[2])
          return run_block(blocks.kinds[i], weights, bank, given[3])

        block_BTD, pull = jax.vjp(block, *given[:2])
        leaves, structure = jax.tree.flatten(pull)
        places = _places(leaves, jax.tree.leaves(given))
        backwards[i] = structure, places
        saved.append([a for a, at in zip(leaves, places) if at is None])
        rows_MBTD = jax.lax.dynamic_update_index_in_dim(
          rows_MBTD, block_BTD, given[2], 0
        )
      return rows_MBTD, saved

    rows_MBTD = jnp.concatenate([jnp.stack(sources), more])
    rows_MBTD, saved = jax.lax.scan(step, rows_MBTD, (steps, weights))
    return rows_MBTD, (weights, rows_MBTD, segment_ids_BT, saved)

  def backward(residuals: Any, drows_MBTD: jax.Array) -> Any:
    weights, rows_MBTD, segment_ids_BT, saved = residuals

    def step(drows_MBTD: jax.Array, xs: Any) -> Any:
      gradients = []
      given_weights, pull_weights = jax.vjp(split, xs[1])
      for i in reversed(range(num_blocks)):
        row = count(xs[0], i)
        given = given_weights[i], rows_MBTD, row, segment_ids_BT
        given, remaining = jax.tree.leaves(given), iter(xs[2][i])
        structure, places = backwards[i]
        leaves = [next(remaining) if at is None else given[at] for at in places]
        dblock_BTD = jax.lax.dynamic_index_in_dim(
          drows_MBTD, row, keepdims=False
        )
        pull = jax.tree.unflatten(structure, leaves)
        dweights, more_MBTD = pull(dblock_BTD)
        gradients.append(dweights)
        drows_MBTD += more_MBTD
      return drows_MBTD, *pull_weights(gradients[::-1])

    drows_MBTD, dweights = jax.lax.scan(
      step, drows_MBTD, (steps, weights, saved), reverse=True
    )
    dsources = layer_stacks.unstack(drows_MBTD[:first], first)
    return dweights, tuple(dsources), None

  run.defvjp(forward, backward)
  weights = layer_stacks.fold((dict(sublayers), reads), blocks.repeats)
  rows_MBTD = run(weights, tuple(sources), segment_ids_BT)
  return tuple(layer_stacks.unstack(rows_MBTD, len(rows_MBTD)))


def _places(leaves: Sequence[Any], given: Sequence[Any]) -> list[int | None]:
  """For each leaf, which of the given arrays it is."""
  return [
    next((i for i, candidate in enumerate(given) if candidate is leaf), None)
    for leaf in leaves
  ]
