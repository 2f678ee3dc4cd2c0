# SPDX-License-Identifier: Apache-2.0
"""How wide sums and statistics are: float32, or wider where their terms are.

No config asks for float64. Networks compute in it when they are given weights
of it, which is how tests tell rounding from mistakes.
"""

import jax
import jax.numpy as jnp


def wide(dtype: jax.typing.DTypeLike) -> jnp.dtype:
  """The dtype of sums over numbers of a dtype."""
  return jnp.promote_types(dtype, jnp.float32)


def widen(x: jax.Array) -> jax.Array:
  """Casts to the dtype of sums."""
  return x.astype(wide(x.dtype))
