# SPDX-License-Identifier: Apache-2.0
"""The matrix product of activations and a weight, and declared costs.

`attnres_jax.flops` counts the matrix products in the program of a module. Some
operations cost less than their products (causal attention computes both
triangles on most backends), some contain no product (a short convolution), and
some are kernels that differ between backends. These are called through
`counted`, which is a plain call except during counting.
"""

from collections.abc import Callable, Iterable, Sequence
import contextlib
import functools
import math
from typing import Any

from flax import nnx
import jax
from jax import ad_checkpoint
from jax.extend import core
import jax.numpy as jnp

from attnres_jax.common import precision
from attnres_jax.common import sharding

# The name by which activation checkpointing recognises weight products.
PRODUCT = "product"


def matrices(init_std: float, rngs: nnx.Rngs) -> Callable[..., nnx.Param]:
  """`matrix(axes, *shape)`: float32 weights, each drawn with a new key.

  They are normal, with this standard deviation. `matrix` takes the letters of
  the axes, such as `D|NH`, their sizes, and metadata (`sharding.Parameter`).
  """
  init = jax.nn.initializers.normal(init_std)

  def matrix(axes: str, *shape: int, **metadata: bool) -> nnx.Param:
    value = init(rngs.params(), shape, jnp.float32)
    return nnx.Param(value, axes=axes, **metadata)

  return matrix


def optional_bias(present: bool, axes: str, *shape: int) -> nnx.Param | None:
  """A float32 bias of zeros, which does not decay, or none."""
  if not present:
    return None
  return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes, decays=False)


def scale(factor: float, *weights: nnx.Param) -> None:
  """Multiplies freshly drawn weights by a factor, in place."""
  for weight in weights:
    weight[...] = factor * weight[...]


def store(modules: Any, dtype: jax.typing.DTypeLike) -> None:
  """Casts matrices to the dtype that they are kept in, in place.

  Exceptions are matrices that are used in float32 (`wide`, the router), and
  matrices whose errors add up in exponents (`exact`, the gates of KDA).
  """
  is_leaf = lambda node: isinstance(node, nnx.Variable)
  for node in jax.tree.leaves(modules, is_leaf=is_leaf):
    metadata = node.get_metadata()
    if (
      "|" in metadata["axes"]
      and not metadata.get("wide")
      and not metadata.get("exact")
    ):
      node.set_value(node[...].astype(dtype))


def linear(
  x: jax.Array,
  weight: jax.Array,
  axes: int = 1,
  out_dtype: jnp.dtype | None = None,
  flat: bool = False,
) -> jax.Array:
  """Contracts the last `axes` axes of `x` with the first of `weight`.

  Products run in the dtype of `x`, sums in float32. The gradient of the weight,
  a sum over all tokens, is float32 for any `x`; autodiff would round it to the
  dtype of `x` first. It is written as the product x^T dy, in the order of the
  weight's axes, so that no operand has to be transposed.

  Args:
    x: [..., *in], activations.
    weight: [*in, *out], master weight, in whose dtype its gradient is.
    axes: how many axes `in` has.
    out_dtype: of the result; None keeps the dtype of `x`.
    flat: whether the product joins the axes of `in`, and the result has all
      axes of `out` as one.

  Returns:
    [..., *out].
  """
  product = _linear(x, weight, axes, out_dtype, flat)
  return ad_checkpoint.checkpoint_name(product, PRODUCT)


def affine(
  x: jax.Array, weight: nnx.Param, bias: nnx.Param | None, axes: int = 1
) -> jax.Array:
  """`linear`, plus a bias if there is one: its gradient is float32, too."""
  return _plus(linear(x, weight[...], axes), bias)


def output(
  x: jax.Array, weight: nnx.Param, axes: int = 1,
  bias: nnx.Param | None = None, flat: bool = False,
) -> jax.Array:  # fmt: skip
  """`affine` from heads or hidden units, which `tensor` shards, to the width.

  x is [B, T, *in], the weight [*in, D]; the first of the axes `in` is sharded.
  `flat` is as in `linear`.
  """
  product = sharding.scatter_sum(
    lambda x, weight: linear(x, weight, axes, flat=flat),
    sharding.HEADS,
    sharding.FIRST_AXIS,
  )
  return _plus(product(x, weight[...]), bias)


def _plus(y: jax.Array, bias: nnx.Param | None) -> jax.Array:
  if bias is None:
    return y
  offset = jnp.reshape(bias[...], (1,) * (y.ndim - bias[...].ndim) + bias.shape)
  return (precision.widen(y) + offset).astype(y.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _linear(
  x: jax.Array, weight: jax.Array, axes: int, out_dtype: Any, flat: bool
) -> jax.Array:
  x, weight, axes = _joined(x, weight, axes, flat)
  return _contract(
    x, weight.astype(x.dtype), range(x.ndim - axes, x.ndim), range(axes),
    out_dtype or x.dtype,
  )  # fmt: skip


def _forward(
  x: jax.Array, weight: jax.Array, axes: int, out_dtype: Any, flat: bool
) -> tuple[jax.Array, Any]:
  return _linear(x, weight, axes, out_dtype, flat), (x, weight)


def _backward(
  axes: int, out_dtype: Any, flat: bool, residuals: Any, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
  x, weight = residuals
  joined_x, joined_weight, axes = _joined(x, weight, axes, flat)
  dx, dweight = gradients(joined_x, joined_weight, dy, axes)
  if flat:
    dweight = _unsplit(dweight)
  dweight = dweight.reshape(weight.shape).astype(weight.dtype)
  return dx.reshape(x.shape), dweight


def _joined(
  x: jax.Array, weight: jax.Array, axes: int, flat: bool
) -> tuple[jax.Array, jax.Array, int]:
  """With `flat`, [..., prod(in)] and [prod(in), prod(out)]."""
  if not flat:
    return x, weight, axes
  size = math.prod(weight.shape[:axes])
  tokens = x.shape[: x.ndim - axes]
  weight = weight.reshape(size, -1)
  if tokens[-1] > 1:  # Else the weight, which may have another layout, is more.
    weight = _unsplit(weight)
  return x.reshape(*tokens, size), weight, 1


def _unsplit(weight: jax.Array) -> jax.Array:
  """Keeps the compiler from splitting axes of activations as the weight's.

  It would copy the activations into another order then.
  """
  return jax.lax.optimization_barrier(weight)


def gradients(
  x: jax.Array, weight: jax.Array, dy: jax.Array, axes: int = 1
) -> tuple[jax.Array, jax.Array]:
  """Gradients of `linear`: dx in the dtype of `x`, and the float32 dweight."""
  dy = dy.astype(x.dtype)
  tokens = x.ndim - axes
  dx = _contract(
    dy,
    weight.astype(x.dtype),
    range(tokens, dy.ndim),
    range(axes, weight.ndim),
    x.dtype,
  )
  dweight = _contract(
    x, dy, range(tokens), range(tokens), precision.wide(x.dtype)
  )
  return dx, dweight


_linear.defvjp(_forward, _backward)


def _contract(
  a: jax.Array, b: jax.Array, a_axes: Iterable[int], b_axes: Iterable[int],
  dtype: Any,
) -> jax.Array:  # fmt: skip
  return jax.lax.dot_general(
    a,
    b,
    ((tuple(a_axes), tuple(b_axes)), ((), ())),
    preferred_element_type=precision.wide(dtype),
  ).astype(dtype)


# Part of the cost of a token, see `flops.operations.FlopsPerToken`; None is
# the part that the products of the same module belong to.
Part = str | None

_counting = jax.make_user_context(False)

COUNTED = core.Primitive("counted")
COUNTED.multiple_results = True
COUNTED.def_abstract_eval(lambda *operands, outs, **cost: outs)


def counting() -> contextlib.AbstractContextManager:
  """A context in which traced programs show `COUNTED` for counted calls."""
  return _counting(True)


def counted(
  function: Callable[..., Any],
  *args: Any,
  flops: float,
  part: Part = None,
  outs: Any,
  scanned: Any = (),
) -> Any:
  """Calls `function(*args)`, which counts as `flops` FLOPs.

  Args:
    function: of arrays.
    *args: its arguments.
    flops: of the call; a multiply-add is two.
    part: see `Part`.
    outs: arrays or `ShapeDtypeStruct`s like its results.
    scanned: arrays that add two FLOPs per entry, the first time that a counted
      call uses each of them (the mean square of a depth source).
  """
  if not _counting.value:
    return function(*args)
  outs, tree = jax.tree.flatten(outs)
  scanned = jax.tree.leaves(scanned)
  results = COUNTED.bind(
    *scanned,
    *(x for x in jax.tree.leaves(args) if not any(x is y for y in scanned)),
    outs=tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in outs),
    flops=flops,
    part=part,
    num_scanned=len(scanned),
  )
  return jax.tree.unflatten(tree, results)


def pair_flops(
  sources: Sequence[jax.Array], key_width: int, num_queries: int = 1
) -> int:
  """FLOPs of reads: dot products of keys and weighted sums of values.

  A (query, source) pair counts as the two, and a source as one mean square,
  however often its norm is recomputed.
  """
  *tokens, width = sources[0].shape
  pairs = num_queries * len(sources) * math.prod(tokens)
  return 2 * pairs * (width + key_width)
