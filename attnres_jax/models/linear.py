# SPDX-License-Identifier: Apache-2.0
"""The matrix product between activations and a weight."""

from collections.abc import Callable
import functools

from flax import nnx
import jax
from jax import ad_checkpoint
import jax.numpy as jnp

from attnres_jax import precision

# The name by which activation checkpointing recognises weight products.
PRODUCT = "product"


def matrices(init_std: float, rngs: nnx.Rngs) -> Callable[..., nnx.Param]:
  """`matrix(*shape)`: float32 weights, each drawn normally with a new key."""
  init = jax.nn.initializers.normal(init_std)
  return lambda *shape: nnx.Param(init(rngs.params(), shape, jnp.float32))


def linear(
  x: jax.Array,
  weight: jax.Array,
  axes: int = 1,
  out_dtype: jnp.dtype | None = None,
) -> jax.Array:
  """Contracts the last `axes` axes of `x` with the first of `weight`.

  Products run in the dtype of `x`, sums in float32. The gradient of the weight,
  a sum over all tokens, is float32 for any `x`; autodiff would round it to the
  dtype of `x` first. It is written as the product x^T dy, in the order of the
  weight's axes, so that no operand has to be transposed.

  Args:
    x: [..., *in], activations.
    weight: [*in, *out], float32 master weight.
    axes: how many axes `in` has.
    out_dtype: of the result; None keeps the dtype of `x`.

  Returns:
    [..., *out].
  """
  product = _linear(x, weight, axes, out_dtype)
  return ad_checkpoint.checkpoint_name(product, PRODUCT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _linear(x, weight, axes, out_dtype):
  return _contract(
    x,
    weight.astype(x.dtype),
    range(x.ndim - axes, x.ndim),
    range(axes),
    out_dtype or x.dtype,
  )


def _forward(x, weight, axes, out_dtype):
  return _linear(x, weight, axes, out_dtype), (x, weight)


def _backward(axes, out_dtype, residuals, dy):
  del out_dtype
  x, weight = residuals
  dx, dweight = gradients(x, weight, dy, axes)
  return dx, dweight.astype(weight.dtype)


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


def _contract(a, b, a_axes, b_axes, dtype):
  return jax.lax.dot_general(
    a,
    b,
    ((tuple(a_axes), tuple(b_axes)), ((), ())),
    preferred_element_type=precision.wide(dtype),
  ).astype(dtype)
