# SPDX-License-Identifier: Apache-2.0
"""The dtype of sums and statistics: float32, or wider if their terms are.

No config uses float64. Networks compute in float64 when their weights are
float64, which is how tests distinguish rounding from mistakes.
"""

import jax
import jax.numpy as jnp

from attnres_kernels import dispatch

Parts = tuple[jax.Array, jax.Array]


def wide(dtype: jax.typing.DTypeLike) -> jnp.dtype:
  """The dtype of sums over values of a dtype."""
  dtype = jnp.dtype(dtype)
  return dtype if dtype.itemsize > 4 else jnp.dtype(jnp.float32)


def widen(x: jax.Array) -> jax.Array:
  """Casts to the dtype of sums."""
  return x.astype(wide(x.dtype))


def split(x: jax.Array, dtype: jax.typing.DTypeLike) -> Parts:
  """Two parts of a narrower dtype, whose sum has nearly the bits of both.

  A running sum in two parts moves as many bytes as a wide one. Who only wants
  it rounded reads the first part, half of them.

  Args:
    x: an array.
    dtype: of the parts. If `x` already has this dtype, the second part is zero.

  Returns:
    `x` rounded, and what is left of it, also rounded: of bfloat16, their sum
    has 16 bits.
  """
  return dispatch.high_and_low(x, dtype)


def join(parts: Parts, dtype: jax.typing.DTypeLike) -> jax.Array:
  """The array of `split`, in this dtype."""
  high, low = (part.astype(dtype) for part in parts)
  return high + low


def add(parts: Parts, x: jax.Array) -> Parts:
  """The parts of their sum with an array, which is computed in `wide`."""
  dtype = parts[0].dtype
  total = join(parts, wide(dtype)) + x.astype(wide(dtype))
  return split(total, dtype)
