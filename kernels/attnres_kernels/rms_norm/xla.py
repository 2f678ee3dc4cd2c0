# SPDX-License-Identifier: Apache-2.0
"""The norm in plain JAX, with gradients by autodiff."""

import jax
import jax.numpy as jnp


def forward(x_TD, gain_D, *, eps):
  x = x_TD.astype(gain_D.dtype)
  mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  gain = gain_D.reshape((1,) * (x.ndim - 1) + (-1,))
  return (x * jax.lax.rsqrt(mean_square + eps) * gain).astype(x_TD.dtype)


def backward(x_TD, gain_D, dy_TD, *, eps):
  """Returns the gradients of x and gain."""
  _, vjp = jax.vjp(lambda x, gain: forward(x, gain, eps=eps), x_TD, gain_D)
  return vjp(dy_TD)
