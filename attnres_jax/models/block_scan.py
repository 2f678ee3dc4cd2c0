# SPDX-License-Identifier: Apache-2.0
"""One scan over depth blocks: a program whose sublayers do not grow with depth.

Each block of Block AttnRes has one more source than the last. Here the sources
are rows of one array [M, B, T, D], of which a block reads as many as there are,
a number known at run time only. A step of the scan runs as many blocks as it
takes for kinds of sublayers to repeat.

Autodiff of such a scan would save all rows once per block. So `append_rows`
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


# Makes a row of its weights, the rows before it, and constants.
Function = Callable[[Any, Bank, Any], jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def append_rows(
  functions: Sequence[Function], split: Callable[[Any], Sequence[Any]],
  weights: Any, sources: Sequence[jax.Array], constants: Any,
) -> jax.Array:  # fmt: skip
  """Appends rows to sources, each of which may depend on all before it:

    rows = sources
    for step_weights in weights:
      for function, its_weights in zip(functions, split(step_weights)):
        rows = append(rows, function(its_weights, rows, constants))

  as one scan, whose steps do not grow. Its gradient saves each row once, and
  what `jax.vjp` saves of each function besides its arguments.

  Args:
    functions: of a step; they use no parameters but their arguments. The rows
      are a `Bank`, of which the last are zeros until they are known.
    split: gives each function its part of a step's weights.
    weights: a tree whose leaves have a leading axis over the steps.
    sources: the first rows, in separate arrays.
    constants: a tree of arrays that have no gradient.

  Returns:
    All rows, [sources + steps * functions, ...].
  """
  return _forward(functions, split, weights, sources, constants)[0]


def _forward(functions, split, weights, sources, constants):
  first, steps = len(sources), len(jax.tree.leaves(weights)[0])
  shape = steps * len(functions), *sources[0].shape
  more = jnp.zeros_like(sources[0], shape=shape)

  def step(rows, xs):
    number, weights = xs
    saved = []
    for i, (function, part) in enumerate(zip(functions, split(weights))):
      count = first + number * len(functions) + i
      make = lambda part, rows, f=function, n=count: f(
        part, Bank(rows, n), constants
      )
      row, pull = jax.vjp(make, part, rows)
      saved.append(_without(pull, (part, rows, count, constants)))
      rows = jax.lax.dynamic_update_index_in_dim(rows, row, count, 0)
    return rows, saved

  rows = jnp.concatenate([jnp.stack(sources), more])
  numbers = jnp.arange(steps)
  rows, saved = jax.lax.scan(step, rows, (numbers, weights))
  return rows, (weights, rows, constants, saved, numbers)


def _backward(functions, split, residuals, drows):
  weights, rows, constants, saved, numbers = residuals
  first = len(rows) - len(numbers) * len(functions)

  def step(drows, xs):
    number, weights, saved = xs
    parts, pull_weights = jax.vjp(split, weights)
    gradients = []
    for i in reversed(range(len(functions))):
      count = first + number * len(functions) + i
      pull = _with(saved[i], (parts[i], rows, count, constants))
      drow = jax.lax.dynamic_index_in_dim(drows, count, keepdims=False)
      dpart, more = pull(drow)
      gradients.append(dpart)
      drows += more
    return drows, *pull_weights(gradients[::-1])

  xs = numbers, weights, saved
  drows, dweights = jax.lax.scan(step, drows, xs, reverse=True)
  return dweights, tuple(layer_stacks.unstack(drows[:first], first)), None


append_rows.defvjp(_forward, _backward)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Argument:
  """Stands for an argument in what a function saved: the number of its leaf."""

  number: int


def _without(pull: Any, arguments: Any) -> Any:
  """A pullback without the arrays that are among the arguments."""
  numbers = {id(a): i for i, a in enumerate(jax.tree.leaves(arguments))}
  return jax.tree.map(
    lambda a: _Argument(numbers[id(a)]) if id(a) in numbers else a, pull
  )


def _with(saved: Any, arguments: Any) -> Any:
  """The inverse of `_without`, given the same arguments once more."""
  leaves = jax.tree.leaves(arguments)
  is_argument = lambda a: isinstance(a, _Argument)
  return jax.tree.map(
    lambda a: leaves[a.number] if is_argument(a) else a, saved,
    is_leaf=is_argument,
  )  # fmt: skip


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
  from `segments.blocks_of`; sublayers have one stack per kind, in the order of
  depth.
  """
  sizes = [len(kinds) for kinds in blocks.kinds]

  def split(weights: Any) -> list[Any]:
    """The weights of each block of a step."""
    sublayers, reads = weights
    kinds = segments.sublayers_of(blocks).kinds
    layers = layer_stacks.in_order(sublayers, kinds)
    layers = map(layer_stacks.unsliced, layers)
    return [
      (list(itertools.islice(layers, size)), reads)
      for size, reads in zip(sizes, layer_stacks.split(reads, sizes))
    ]

  weights = layer_stacks.fold((dict(sublayers), reads), blocks.repeats)
  functions = [functools.partial(run_block, kinds) for kinds in blocks.kinds]
  rows_MBTD = append_rows(
    functions, split, weights, tuple(sources), segment_ids_BT
  )
  return tuple(layer_stacks.unstack(rows_MBTD, len(rows_MBTD)))
