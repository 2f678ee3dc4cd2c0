# SPDX-License-Identifier: Apache-2.0
"""Numbers of eight bits, each times a scale that it shares with others.

Generating text reads every weight and the whole cache for each token, so fewer
bytes are more tokens. A weight is rounded per output channel: all entries that
are summed into one number share a scale, which is therefore applied once, to
the sum. Entries of a cache share a scale per token and head. Codes are exact in
bfloat16, so products of codes are as precise as those of other weights.

  x ~ codes * scale,   scale = max |x| / 127

Only inference rounds: there are no gradients. `linear` and `grouped` multiply
by rounded weights, `softmax.attend_after` reads rounded caches, and any other
use of one is an error.
"""

import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import sharding

_BITS = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rounded:
  """An array in eight bits.

  Attributes:
    codes: int8.
    scale: float32, of as many axes; those whose entries share a scale have
      size 1.
  """

  codes: jax.Array
  scale: jax.Array

  @property
  def shape(self) -> tuple[int, ...]:
    return self.codes.shape

  def __getitem__(self, index: Any) -> "Rounded":
    """Some entries of leading axes that do not share scales."""
    return Rounded(self.codes[index], self.scale[index])


class Matrix(nnx.Module):
  """In a module, takes the place of a parameter that is a matrix."""

  def __init__(self, weight: Rounded, axes: str):
    letters = _letters_of_scale(axes)
    # `wide`: no product casts them.
    self.codes = nnx.Param(weight.codes, axes=axes, wide=True)
    self.scale = nnx.Param(weight.scale, axes=letters, wide=True)

  def __getitem__(self, index: Any) -> Rounded:
    return Rounded(self.codes[index], self.scale[index])


def nearest(
  x: jax.Array, axes: int | tuple[int, ...] = -1, bits: int = _BITS
) -> Rounded:
  """Rounds to the nearest code; entries along `axes` share a scale.

  Args:
    x: of any float dtype.
    axes: see above.
    bits: of a code, with its sign; int8 holds them in any case.
  """
  limit = 2 ** (bits - 1) - 1
  x = x.astype(jnp.float32)
  largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
  scale = jnp.where(largest > 0, largest / limit, 1.0)
  return Rounded(jnp.round(x / scale).astype(jnp.int8), scale)


def dense(x: jax.Array | Rounded, dtype: jax.typing.DTypeLike) -> jax.Array:
  """The array that it stands for, in `dtype`."""
  if isinstance(x, Rounded):
    x = x.codes.astype(jnp.float32) * x.scale
  return x.astype(dtype)


def round_weights(model: Any, bits: int = _BITS) -> Any:
  """The same network with the weights of its products rounded.

  These are all matrices of mixers, MLPs and experts but those that say they are
  `wide` (the router) or `exact` (the gates of KDA), and the head. A tied head
  becomes a matrix of its own: token vectors stay as they are, like everything
  of the residual scheme.

  Args:
    model: a `Transformer`, which is not changed.
    bits: see `nearest`.
  """

  def one(node: nnx.Variable) -> Any:
    said = node.get_metadata()
    axes = said["axes"]
    if "|" not in axes or said.get("wide") or said.get("exact"):
      return node
    return Matrix(nearest(node[...], _summed(axes), bits), axes)

  def matrices(tree: Any) -> Any:
    is_leaf = lambda node: isinstance(node, nnx.Variable)
    return jax.tree.map(one, tree, is_leaf=is_leaf)

  def all_of(tree: Any) -> Any:
    """A copy whose attributes can be replaced."""
    return jax.tree.map(lambda a: a, tree)

  model = all_of(model)
  model.sublayers = matrices(model.sublayers)
  if model.embedding.head is None:
    head = nnx.Param(model.embedding.head_DV(), axes="D|V")
    model.embedding.head = nnx.data(one(head))
  else:
    model.embedding.head = one(model.embedding.head)
  return model


def _summed(axes: str) -> tuple[int, ...]:
  """The axes over which a product sums, counted from the last one."""
  *_, rows, columns = axes.split("|")
  first = -len(rows + columns)
  return tuple(range(first, first + len(rows)))


def _letters_of_scale(axes: str) -> str:
  """Letters that no mesh cuts where the scale has size 1."""
  *stack, rows, columns = axes.split("|")
  return "|".join([*stack, sharding.UNCUT * len(rows), columns])
