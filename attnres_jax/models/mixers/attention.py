# SPDX-License-Identifier: Apache-2.0
"""Causal softmax attention with grouped queries (arXiv:2305.13245)."""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax import precision
from attnres_jax.models import linear
from attnres_jax.models import norm as norm_lib
from attnres_jax.models.mixers import softmax
from attnres_jax.models.residuals import base


class Attention(nnx.Module):
  """Grouped-query causal attention, with or without rotary positions."""

  reads_qkv = True

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    self.rope_theta = config.rope_theta
    self.kernel = config.attention_kernel
    self.dtype = jnp.dtype(config.dtype)
    width, heads = config.width, config.num_heads
    kv_heads, head = config.kv_heads, config.head_size
    matrix = linear.matrices(config.init_std, rngs)

    self.query = matrix("D|NH", width, heads, head)
    self.key = matrix("D|KH", width, kv_heads, head)
    self.value = matrix("D|KH", width, kv_heads, head)
    self.output = matrix("NH|D", heads, head, width)
    norm = config.qkv_norm, head, config.norm_eps, "H"
    self.query_norm = norm_lib.optional(*norm)
    self.key_norm = norm_lib.optional(*norm)
    self.value_norm = norm_lib.optional(*norm)

  def __call__(
    self, x: jax.Array | base.QKV, segment_ids_BT: jax.Array | None = None
  ) -> jax.Array:
    """Mixes positions s <= t, within a document if segment ids are given."""
    return self.finish(x, *self.project(x), segment_ids_BT)

  def project(
    self, x: jax.Array | base.QKV
  ) -> tuple[jax.Array, jax.Array, Any]:
    """Queries [B, T, N, H], keys and values [B, T, K, H], without positions."""
    x = base.qkv(x)
    return (
      self.query_norm(linear.linear(x.query, self.query[...])),
      self.key_norm(linear.linear(x.key, self.key[...])),
      self._values(x.value),
    )

  def finish(
    self,
    x: jax.Array | base.QKV,
    query_BTNH: jax.Array,
    key_BTKH: jax.Array,
    value_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    columns: softmax.Columns | None = None,
  ) -> jax.Array:
    """The output, of heads as from `project`, which may attend to more."""
    del x
    if self.rope_theta:
      query_BTNH = apply_rope(query_BTNH, self.rope_theta)
      key_BTKH = apply_rope(key_BTKH, self.rope_theta)
    mixed_BTNH = softmax.causal_attention(
      query_BTNH,
      key_BTKH,
      value_BTKH,
      segment_ids_BT,
      kernel=self.kernel,
      tile=softmax.TILE if self.kernel == "tiled" else 0,
      columns=columns,
    )
    return linear.linear(mixed_BTNH, self.output[...], 2)

  def scale_values(self, factor: float) -> None:
    """Multiplies the weights of values and output."""
    linear.scale(factor, self.value, self.output)

  def init_cache(self, batch: int, length: int) -> tuple[jax.Array, jax.Array]:
    """A cache of keys and values for `length` tokens per row, all zeros."""
    shape = batch, length, *self.key[...].shape[1:]
    return jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)

  def _values(self, x_BTD: jax.Array) -> Any:
    """None if the mixer uses the values of another one."""
    if self.value is None:
      return None
    return self.value_norm(linear.linear(x_BTD, self.value[...]))


def apply_rope(x_BTNH: jax.Array, theta: float) -> jax.Array:
  """Rotates each pair of channels by position times its frequency.

  Rotary positions (arXiv:2104.09864), first half paired with second half.

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
