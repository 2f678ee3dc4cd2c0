# SPDX-License-Identifier: Apache-2.0
"""Rotary positions (arXiv:2104.09864), and how they reach further.

Pair i of a vector's H channels, channel i and i + H / 2, turns by
theta^(-2 i / H) per token. `llama3` slows down the pairs that turn rarely.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision


def apply_rope(
  x_BTNH: jax.Array,
  theta: float,
  position_BT: jax.Array | None = None,
  scaling: config_lib.RopeConfig = config_lib.RopeConfig(),
) -> jax.Array:
  """Rotates each pair of channels by position times its frequency.

  H is even, `theta` the base of frequencies, and positions count from
  0 along T by default. Packed documents need no reset, because only
  differences of positions matter.
  """
  length, half = x_BTNH.shape[1], x_BTNH.shape[-1] // 2
  dtype = precision.wide(x_BTNH.dtype)
  frequency = _frequencies(half, theta, scaling, dtype)
  if position_BT is None:
    position_BT = jnp.arange(length)[None]
  angle_BTH = position_BT.astype(dtype)[..., None] * frequency[None, None]
  cos, sin = jnp.cos(angle_BTH)[:, :, None], jnp.sin(angle_BTH)[:, :, None]
  x_wide = x_BTNH.astype(dtype)
  first, second = jnp.split(x_wide, 2, axis=-1)
  rotated = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return rotated.astype(x_BTNH.dtype)


def _frequencies(
  half: int, theta: float, scaling: config_lib.RopeConfig, dtype: Any
) -> jax.Array:
  """Radians per token of each pair, [H / 2]."""
  frequency = theta ** (-jnp.arange(half, dtype=dtype) / half)
  if scaling.scaling == "none":
    return frequency
  turns = scaling.original_length * frequency / (2 * math.pi)
  span = scaling.high_turns - scaling.low_turns
  share = jnp.clip((turns - scaling.low_turns) / span, 0, 1)
  return frequency * (share + (1 - share) / scaling.factor)
