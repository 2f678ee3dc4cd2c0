# SPDX-License-Identifier: Apache-2.0
"""The dtype of sums and statistics: float32, or wider if their terms are.

No config uses float64. Networks compute in float64 when their weights are
float64, which is how tests distinguish rounding from mistakes.
"""

import jax
import jax.numpy as jnp


def wide(dtype: jax.typing.DTypeLike) -> jnp.dtype:
  """The dtype of sums over values of a dtype."""
  dtype = jnp.dtype(dtype)
  return dtype if dtype.itemsize > 4 else jnp.dtype(jnp.float32)


def widen(x: jax.Array) -> jax.Array:
  """Casts to the dtype of sums."""
  return x.astype(wide(x.dtype))


def scaled(h: jax.Array, scale: jax.Array | None) -> jax.Array:
  """A mixture times its factor, if it has one; the product is float32."""
  if scale is None:
    return h
  x_wide = widen(h)
  return (x_wide * scale.astype(x_wide.dtype)).astype(h.dtype)
