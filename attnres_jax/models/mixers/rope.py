# SPDX-License-Identifier: Apache-2.0
"""Rotary positions (arXiv:2104.09864), and how they reach further.

Pair i of a vector's H channels turns by theta^(-2 i / H) per token. `yarn`
(arXiv:2309.00071) and `llama3` slow down the pairs that turn rarely.
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

  The result has the first channels of all pairs first, whichever channels are
  `scaling.pairs`: dot products do not depend on the order.

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
  if scaling.pairs == "neighbours":
    first, second = x_wide[..., ::2], x_wide[..., 1::2]
  else:
    first, second = jnp.split(x_wide, 2, axis=-1)
  rotated = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return rotated.astype(x_BTNH.dtype)


def scaled_queries(
  query: jax.Array, scaling: config_lib.RopeConfig
) -> jax.Array:
  """Queries times the factor of all logits."""
  if scaling.logit_scale == 1:
    return query
  return (precision.widen(query) * scaling.logit_scale).astype(query.dtype)


def _frequencies(
  half: int, theta: float, scaling: config_lib.RopeConfig, dtype: Any
) -> jax.Array:
  """Radians per token of each pair, [H / 2]."""
  frequency = theta ** (-jnp.arange(half, dtype=dtype) / half)
  if scaling.scaling == "none":
    return frequency
  if scaling.scaling == "llama3":
    turns = scaling.original_length * frequency / (2 * math.pi)
    span = scaling.high_turns - scaling.low_turns
    share = jnp.clip((turns - scaling.low_turns) / span, 0, 1)
  else:
    share = _yarn_share(half, theta, scaling, dtype)
  return frequency * (share + (1 - share) / scaling.factor)


def _yarn_share(
  half: int, theta: float, scaling: config_lib.RopeConfig, dtype: Any
) -> jax.Array:
  """1 for pairs that keep their frequency, 0 for those divided by the factor.

  Linear in the number of the pair, between the pairs that turn `high_turns` and
  `low_turns` times in `original_length` tokens, rounded outwards.
  """

  def pair(turns):
    tokens_per_radian = scaling.original_length / (turns * 2 * math.pi)
    return half * math.log(tokens_per_radian) / math.log(theta)

  first = max(math.floor(pair(scaling.high_turns)), 0)
  last = min(math.ceil(pair(scaling.low_turns)), 2 * half - 1)
  # As published code does where both are the same.
  span = last - first or 1e-3
  number = jnp.arange(half, dtype=dtype)
  return 1 - jnp.clip((number - first) / span, 0, 1)
