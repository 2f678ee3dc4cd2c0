# SPDX-License-Identifier: Apache-2.0
"""Stacks: trees whose leaves have a leading axis over sublayers.

Also, which sublayers repeat a pattern, so that a scan can run them.
"""

from collections.abc import Mapping, Sequence
import itertools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax.common import scopes


def split(tree: Any, sizes: Sequence[int]) -> list[Any]:
  """Cuts every leaf along its leading axis into parts of these sizes.

  Unlike that of slices, the gradient is one concatenation. A list of
  `separated` layers becomes several lists.
  """
  if isinstance(tree, nnx.List):
    layers = iter(tree)
    return [nnx.List(itertools.islice(layers, size)) for size in sizes]
  leaves, structure = jax.tree.flatten(tree)
  parts = [jax.lax.split(leaf, sizes, axis=0) for leaf in leaves]
  return [
    jax.tree.unflatten(structure, [s[i] for s in parts])
    for i in range(len(sizes))
  ]


def in_order(stacks: Mapping[str, Any], kinds: Sequence[str]) -> list[Any]:
  """Unstacks the modules of all kinds, in the order of `kinds`."""
  singles = {}
  for kind in dict.fromkeys(kinds):
    with scopes.part(kind):
      singles[kind] = iter(unstack(stacks[kind], kinds.count(kind)))
  return [next(singles[kind]) for kind in kinds]


def tiles(x_BT: jax.Array, size: int) -> jax.Array:
  """[B, T, ...] to [tiles, B, size, ...], padded with zeros at the end."""
  padding = [(0, 0), (0, -x_BT.shape[1] % size), *[(0, 0)] * (x_BT.ndim - 2)]
  x_BT = jnp.pad(x_BT, padding)
  shape = x_BT.shape[0], -1, size, *x_BT.shape[2:]
  return jnp.moveaxis(x_BT.reshape(shape), 1, 0)


def fold(tree: Any, repeats: int) -> Any:
  """Splits leading axes of repeats * n into repeats and n."""
  return jax.tree.map(
    lambda a: a.reshape(repeats, a.shape[0] // repeats, *a.shape[1:]), tree
  )


def unstack(tree: Any, count: int) -> list[Any]:
  """One tree for each of the `count` indices of the leading axis."""
  return [
    jax.tree.map(lambda a: jnp.squeeze(a, 0), part)
    for part in split(tree, [1] * count)
  ]


def single(stack: Any) -> Any:
  """The tree of a stack of one."""
  return jax.tree.map(lambda a: jax.lax.squeeze(a, (0,)), stack)


def one_of(stack: Any, l: int) -> Any:
  """The l-th tree of a stack."""
  return jax.tree.map(
    lambda a: jax.lax.index_in_dim(a, l, keepdims=False), stack
  )


def unsliced(tree: Any) -> Any:
  """Copies slices of a stack into separate arrays.

  Otherwise compilers make slices a part of the products that read them. On
  TPUs, such products take longer, by more than it costs to copy the slice. On
  GPUs, a slice and its cast are one instruction, without a copy in float32.
  """
  return jax.lax.optimization_barrier(tree)


@jax.custom_jvp
def gradients_in_turn(state: Any, weights: Any) -> tuple[Any, Any]:
  """Returns both; backward computes gradients of `weights` first.

  Else the compiler, which sums gradients over devices while it computes, may
  keep whole gradients of several layers until the links are free.
  """
  return state, weights


@gradients_in_turn.defjvp
def _gradients_in_turn_jvp(
  primals: tuple[Any, Any], tangents: tuple[Any, Any]
) -> tuple[Any, Any]:
  is_float = lambda a: a.dtype != jax.dtypes.float0
  leaves, tree = jax.tree.flatten(tangents)
  inexact = iter(jax.lax.optimization_barrier(list(filter(is_float, leaves))))
  leaves = [next(inexact) if is_float(a) else a for a in leaves]
  return primals, tuple(jax.tree.unflatten(tree, leaves))


def unstacked(stack: Any) -> tuple[Any, ...]:
  """Stacks of one layer each, of arrays with a leading axis over layers."""
  count = jax.tree.leaves(stack)[0].shape[0]
  return tuple(
    jax.tree.map(lambda a, i=i: jax.lax.slice_in_dim(a, i, i + 1), stack)
    for i in range(count)
  )


def separated(sublayers: Mapping[str, Any]) -> Any:
  """Sublayers that `Trunk.run` and `decoding.extend` take, in separate arrays.

  Compilers for CPUs copy slices of a stack before a product reads them. Where
  gradients accumulate, each layer's is added as soon as it is there, rather
  than kept until all are there to be stacked.
  """
  return nnx.Dict(
    {kind: nnx.List(unstacked(layers)) for kind, layers in sublayers.items()}
  )


def first(layers: Any) -> Any:
  """The first of `separated` layers, or their stack."""
  return layers[0] if isinstance(layers, nnx.List) else layers


def joined(sublayers: Any) -> Mapping[str, Any]:
  """The inverse of `separated`; stacks stay unchanged."""
  join = lambda *a: jnp.concatenate(a)
  return {
    kind: jax.tree.map(join, *layers)
    if isinstance(layers, nnx.List)
    else layers
    for kind, layers in sublayers.items()
  }


def block_norms(
  sublayers: Mapping[str, Any], kinds: Sequence[str]
) -> jax.Array:
  """Euclidean norm of all leaves of each transformer block: [num_layers]."""

  def square(leaf: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(leaf), axis=tuple(range(1, leaf.ndim)))

  # A frozen kind has no leaves.
  squares = [
    sum(map(square, jax.tree.leaves(s)), jnp.zeros(kinds.count(k), jnp.float32))
    for k, s in sublayers.items()
  ]
  # One gather: a slice per sublayer would let the program grow with depth.
  by_kind = [l for k in sublayers for l, kind in enumerate(kinds) if kind == k]
  squares_L = jnp.concatenate(squares)[np.argsort(by_kind)]
  return jnp.sqrt(jnp.sum(squares_L.reshape(-1, 2), axis=1))


class Run(NamedTuple):
  """Consecutive sublayers: `kinds`, repeated `repeats` times."""

  kinds: tuple[Any, ...]
  repeats: int

  @property
  def length(self) -> int:
    return len(self.kinds) * self.repeats

  def count(self, kind: str) -> int:
    """Number of sublayers of this kind, over all repeats."""
    return self.kinds.count(kind) * self.repeats


def find_runs(kinds: Sequence[Any]) -> tuple[Run, ...]:
  """Cuts a sequence of kinds into runs, greedily the longest repetition first.

  Of two repetitions of equal length, the one with the shorter period is chosen.
  Sublayers that repeat nothing become runs of length one.

    a b a b c   ->   (a b) x 2, (c) x 1
  """
  kinds, runs, start = tuple(kinds), [], 0
  while start < len(kinds):
    rest = kinds[start:]
    candidates = [
      Run(rest[:period], _repeats(rest, period))
      for period in range(1, len(rest) // 2 + 1)
    ]
    candidates = [run for run in candidates if run.repeats > 1]
    longest = max(
      candidates, key=lambda run: run.length, default=Run(rest[:1], 1)
    )
    runs.append(longest)
    start += longest.length
  return tuple(runs)


def no_runs(kinds: Sequence[Any]) -> tuple[Run, ...]:
  """Every sublayer as a separate run."""
  return tuple(Run((kind,), 1) for kind in kinds)


def _repeats(kinds: tuple[Any, ...], period: int) -> int:
  """How often the first `period` kinds are repeated from the start."""
  count = 1
  while kinds[count * period : (count + 1) * period] == kinds[:period]:
    count += 1
  return count
