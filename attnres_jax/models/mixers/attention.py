# SPDX-License-Identifier: Apache-2.0
"""Causal softmax attention with grouped queries (arXiv:2305.13245).

Rotary positions (arXiv:2104.09864): pair i of a vector's H channels, channel i
and i + H / 2, turns by theta^(-2 i / H) per token. `llama3` slows down the
pairs that turn rarely.
"""

from collections.abc import Callable
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.common import sharding
from attnres_jax.models import linear
from attnres_jax.models import norm as norm_lib
from attnres_jax.models.mixers import cache as cache_lib
from attnres_jax.models.mixers import causal_attention
from attnres_jax.models.mixers import probe as probe_lib
from attnres_jax.models.residuals import base


class Mixer(nnx.Module):
  """A mixer in parts, whose values may come from elsewhere.

  Subclasses define `project`, from inputs to queries, keys and values of heads
  [B, T, N, H]; `finish`, from these to the output; and `extend_heads`, the same
  for new tokens.
  """

  reads_qkv = True
  project: Callable[..., tuple[Any, ...]]
  finish: Callable[..., jax.Array]
  extend_heads: Callable[..., tuple[jax.Array, Any]]

  def __call__(
    self, x: jax.Array | base.QKV, segment_ids_BT: jax.Array | None = None
  ) -> jax.Array:
    """Mixes positions s <= t, within a document if segment ids are given."""
    return self.finish(x, *self.project(x), segment_ids_BT)

  def extend(
    self, x: jax.Array | base.QKV, cache: Any, chunk: cache_lib.Chunk
  ) -> tuple[jax.Array, Any]:
    """The output of new tokens, and what the cache should add."""
    return self.extend_heads(x, *self.project(x), cache, chunk)


class SoftmaxMixer(Mixer):
  """Softmax attention over the sequence, in training and while decoding.

  Attributes:
    kernel: a value of `model.attention_kernel`.
    probe: of the logits, if they are wanted.
  """

  probe: probe_lib.LogitProbe | None = None
  kernel: str

  def turned(
    self, x_BTNC: jax.Array, position_BT: jax.Array | None = None
  ) -> jax.Array:
    """Queries or keys with their positions, by default 0, 1, ...; or as is."""
    del position_BT
    return x_BTNC

  def outputs(
    self, x: jax.Array | base.QKV, mixed_BTNV: jax.Array
  ) -> jax.Array:
    """The output [B, T, D], of the mixture of values of each head."""
    raise NotImplementedError

  def finish(
    self, x: jax.Array | base.QKV, query_BTNH: jax.Array, key_BTKH: jax.Array,
    value_BTKV: jax.Array, segment_ids_BT: jax.Array | None = None,
  ) -> jax.Array:  # fmt: skip
    """The output, of heads as from `project`."""
    query_BTNH, key_BTKH = self.turned(query_BTNH), self.turned(key_BTKH)
    if self.probe is not None:
      query_BTNH = probe_lib.probed(
        query_BTNH, key_BTKH, segment_ids_BT, self.probe[...]
      )
    mixed_BTNV = causal_attention.attend(
      query_BTNH, key_BTKH, value_BTKV, segment_ids_BT, kernel=self.kernel
    )
    return self.outputs(x, mixed_BTNV)

  def extend_heads(
    self, x: jax.Array | base.QKV, query_BTNH: jax.Array, key_BTKH: jax.Array,
    value_BTKV: jax.Array, cache: cache_lib.Tokens | cache_lib.Open,
    chunk: cache_lib.Chunk,
  ) -> tuple[jax.Array, cache_lib.Tokens | cache_lib.Stored]:  # fmt: skip
    """`extend`, of heads as from `project`."""
    position_BT = chunk.position_BT(query_BTNH.shape[1])
    mixed_BTNV, new = causal_attention.extend(
      self.turned(query_BTNH, position_BT), self.turned(key_BTKH, position_BT),
      value_BTKV, cache, chunk, kernel=self.kernel,
    )  # fmt: skip
    return self.outputs(x, mixed_BTNV), new


class Attention(SoftmaxMixer):
  """Grouped-query causal attention, with or without rotary positions."""

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    self.rope_theta, self.rope = config.rope_theta, config.rope
    self.kernel = config.attention_kernel
    self.dtype = jnp.dtype(config.dtype)
    width, heads = config.width, config.num_heads
    kv_heads, head = config.kv_heads, config.head_size
    matrix = linear.matrices(config.init_std, rngs)

    self.query = matrix("D|NH", width, heads, head)
    self.key = matrix("D|KH", width, kv_heads, head)
    self.value = matrix("D|KH", width, kv_heads, head)
    self.output = matrix("NH|D", heads, head, width)
    variant = config.attention
    qkv = variant.qkv_bias
    self.query_bias = linear.optional_bias(qkv, "NH", heads, head)
    self.key_bias = linear.optional_bias(qkv, "KH", kv_heads, head)
    self.value_bias = linear.optional_bias(qkv, "KH", kv_heads, head)
    self.output_bias = linear.optional_bias(variant.output_bias, "D", width)
    qk_norm = config.qkv_norm or variant.qk_norm
    norm = head, config.norm_eps, "H"
    self.query_norm = norm_lib.optional(qk_norm, *norm)
    self.key_norm = norm_lib.optional(qk_norm, *norm)
    self.value_norm = norm_lib.optional(config.qkv_norm, *norm)

  def project(self, x: jax.Array | base.QKV) -> tuple[Any, ...]:
    """Queries [B, T, N, H], keys and values [B, T, K, H], without positions."""
    x = base.qkv(x)
    return (
      self.query_norm(linear.affine(x.query, self.query, self.query_bias)),
      self.key_norm(linear.affine(x.key, self.key, self.key_bias)),
      self.value_norm(linear.affine(x.value, self.value, self.value_bias)),
    )

  def turned(
    self, x_BTNC: jax.Array, position_BT: jax.Array | None = None
  ) -> jax.Array:
    if not self.rope_theta:
      return x_BTNC
    return apply_rope(x_BTNC, self.rope_theta, position_BT, self.rope)

  def outputs(
    self, x: jax.Array | base.QKV, mixed_BTNV: jax.Array
  ) -> jax.Array:
    return linear.output(mixed_BTNV, self.output, 2, self.output_bias)

  def scale_values(self, factor: float) -> None:
    """Multiplies the weights of values and output."""
    linear.scale(factor, self.value, self.output)

  def scale_logits(self, factor_N: jax.Array) -> None:
    """Multiplies the weights of queries and keys, by the factor together."""
    query, key = self.query[...], self.key[...]
    if query.shape == key.shape:
      factor_N = jnp.sqrt(factor_N)
      self.key[...] = key * factor_N[None, :, None]
      if self.key_bias is not None:
        self.key_bias[...] = self.key_bias[...] * factor_N[:, None]
    # Several heads share grouped keys, which would scale all of them.
    self.query[...] = query * factor_N[None, :, None]
    if self.query_bias is not None:
      self.query_bias[...] = self.query_bias[...] * factor_N[:, None]

  def init_cache(
    self, batch: int, length: int, heads: bool = False
  ) -> cache_lib.Tokens:
    """Keys, with positions, and values of `length` tokens per row: zeros."""
    _, kv_heads, width = self.key[...].shape
    zeros_BKSH = jnp.zeros((batch, kv_heads, length, width), self.dtype)
    return cache_lib.Tokens((zeros_BKSH, zeros_BKSH))

  def cache_specs(
    self, heads: bool = False
  ) -> tuple[jax.sharding.PartitionSpec, ...]:
    """How a mesh shards the arrays of the cache."""
    return (sharding.ROWS_AND_HEADS,) * 2


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
