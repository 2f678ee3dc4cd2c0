# SPDX-License-Identifier: Apache-2.0
"""Rotary positions (arXiv:2104.09864), first half paired with second half."""

import jax
import jax.numpy as jnp

from attnres_jax import precision


def apply_rope(x_BTNH: jax.Array, theta: float) -> jax.Array:
  """Rotates each pair of channels by position times its frequency.

  Args:
    x_BTNH: queries or keys, H even; positions count from 0 along T. Documents
      packed into one row need no reset, because only position differences
      matter.
    theta: base of the geometric frequencies.
  """
  length, half = x_BTNH.shape[1], x_BTNH.shape[-1] // 2
  dtype = precision.wide(x_BTNH.dtype)
  frequency = theta ** (-jnp.arange(half, dtype=dtype) / half)
  angle = jnp.arange(length, dtype=dtype)[:, None] * frequency[None, :]
  cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
  first, second = jnp.split(x_BTNH.astype(dtype), 2, axis=-1)
  rotated = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return rotated.astype(x_BTNH.dtype)
