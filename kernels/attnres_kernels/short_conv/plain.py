# SPDX-License-Identifier: Apache-2.0
"""The convolution in plain JAX: one shifted product per tap."""

import jax
import jax.numpy as jnp

from attnres_kernels import platforms


def forward(
  x: jax.Array, taps: jax.Array, tail: jax.Array | None, same: jax.Array | None,
  *, unit_eps: float | None,
) -> jax.Array:  # fmt: skip
  """Like `api.short_conv`; bit s of `same` says if token t - s is in reach."""
  dtype = platforms.accumulator(x)
  number, length = taps.shape[0], x.shape[1]
  if tail is None:
    tail = jnp.zeros((x.shape[0], number - 1, *x.shape[2:]), x.dtype)
  padded = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
  total = jnp.zeros((), dtype)
  for i in range(number):
    shifted = padded[:, i : i + length].astype(dtype)
    if same is not None:
      reaches = (same >> (number - 1 - i)) & 1 > 0
      shifted = jnp.where(reaches[..., None, None], shifted, 0)
    total += taps[i].astype(dtype)[None, None] * shifted
  y = jax.nn.silu(total)
  if unit_eps is not None:
    square = jnp.sum(jnp.square(y), axis=-1, keepdims=True)
    y *= jax.lax.rsqrt(square + unit_eps)
  return y.astype(x.dtype)
