# SPDX-License-Identifier: Apache-2.0
"""The norm in plain JAX, with gradients by autodiff."""

import jax
import jax.numpy as jnp


def forward(
  x_TD: jax.Array, gain_D: jax.Array, gate_TD: jax.Array | None, *, eps: float
) -> jax.Array:
  x = x_TD.astype(gain_D.dtype)
  mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  gain = gain_D.reshape((1,) * (x.ndim - 1) + (-1,))
  y = x * jax.lax.rsqrt(mean_square + eps) * gain
  if gate_TD is not None:
    y *= jax.nn.sigmoid(gate_TD.astype(gain_D.dtype))
  return y.astype(x_TD.dtype)
