# SPDX-License-Identifier: Apache-2.0
"""Causal softmax attention with grouped queries (arXiv:2305.13245)."""

from flax import nnx
import jax

from attnres_jax import config as config_lib
from attnres_jax.models import linear
from attnres_jax.models import rope
from attnres_jax.models.mixers import softmax


class Attention(nnx.Module):
  """Grouped-query causal attention, with or without rotary positions."""

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    self.rope_theta = config.rope_theta
    self.kernel = config.attention_kernel
    width, heads = config.width, config.num_heads
    kv_heads, head = config.kv_heads, config.head_size
    matrix = linear.matrices(config.init_std, rngs)

    self.query = matrix(width, heads, head)
    self.key = matrix(width, kv_heads, head)
    self.value = matrix(width, kv_heads, head)
    self.output = matrix(heads, head, width)

  def __call__(
    self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> jax.Array:
    """Mixes positions s <= t, within a document if segment ids are given."""
    query_BTNH = linear.linear(x_BTD, self.query[...])
    key_BSKH = linear.linear(x_BTD, self.key[...])
    value_BSKH = linear.linear(x_BTD, self.value[...])
    if self.rope_theta:
      query_BTNH = rope.apply_rope(query_BTNH, self.rope_theta)
      key_BSKH = rope.apply_rope(key_BSKH, self.rope_theta)
    mixed_BTNH = softmax.causal_attention(
      query_BTNH,
      key_BSKH,
      value_BSKH,
      segment_ids_BT,
      kernel=self.kernel,
      tile=softmax.TILE if self.kernel == "tiled" else 0,
    )
    return linear.linear(mixed_BTNH, self.output[...], 2)
