# SPDX-License-Identifier: Apache-2.0
"""RMSNorm (arXiv:1910.07467), with float32 statistics."""

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax.common import precision
from attnres_jax.common import sharding
import attnres_kernels


class Identity(nnx.Module):
  """Where a scheme or config wants no norm."""

  def __call__(self, x: jax.Array) -> jax.Array:
    return x


class RMSNorm(nnx.Module):
  """x / rms(x) * gain over the last axis; the gain starts at one."""

  def __init__(self, width: int, eps: float, axes: str = "D"):
    self.eps = eps
    self.gain = nnx.Param(jnp.ones(width, jnp.float32), axes=axes)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalises `x` [..., D] in float32, returns its dtype."""
    x_wide = precision.widen(x)
    normed = x_wide * inverse_rms(x_wide, self.eps)
    gain = jnp.reshape(self.gain[...], (1,) * (x.ndim - 1) + (-1,))
    return (normed * gain).astype(x.dtype)

  def in_one_pass(self, x: jax.Array) -> jax.Array:
    """Normalises `x` [B, T, D] in a separate operator.

    For what no matrix product makes, such as the mixtures of a kernel.
    """

    def norm(x, gain):
      return attnres_kernels.rms_norm(x, gain, eps=self.eps)

    tokens = sharding.TOKENS
    split = sharding.by_shards(norm, (tokens, sharding.WHOLE), tokens)
    return split(x, self.gain[...])

  def gated(self, x: jax.Array, gate: jax.Array) -> jax.Array:
    """Times sigmoid(gate), of heads [B, T, N, H], as a separate operator."""
    # A single token is fused with the product that follows.
    form = "xla" if x.shape[1] == 1 else None

    def norm(x, gain, gate):
      return attnres_kernels.rms_norm(
        x, gain, gate, eps=self.eps, implementation=form
      )

    heads = sharding.HEADS
    split = sharding.by_shards(norm, (heads, sharding.WHOLE, heads), heads)
    return split(x, self.gain[...], gate)


def optional(
  present: bool, width: int, eps: float, axes: str = "D"
) -> RMSNorm | Identity:
  """A norm, or none."""
  return RMSNorm(width, eps, axes) if present else Identity()


def inverse_rms(x: jax.Array, eps: float) -> jax.Array:
  """1 / rms(x) over the last axis, which stays with size one."""
  mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  return jax.lax.rsqrt(mean_square + eps)
