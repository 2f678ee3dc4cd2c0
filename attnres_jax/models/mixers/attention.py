# SPDX-License-Identifier: Apache-2.0
"""Causal softmax attention with grouped queries (arXiv:2305.13245)."""

from typing import Literal

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.models import linear
from attnres_jax.models import rope


class Attention(nnx.Module):
  """Grouped-query causal attention, with rotary positions or none."""

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    self.rope_theta = config.rope_theta
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
    """Mixes positions s <= t, inside a document where segment ids are given."""
    query_BTNH = linear.linear(x_BTD, self.query[...])
    key_BSKH = linear.linear(x_BTD, self.key[...])
    value_BSKH = linear.linear(x_BTD, self.value[...])
    if self.rope_theta:
      query_BTNH = rope.apply_rope(query_BTNH, self.rope_theta)
      key_BSKH = rope.apply_rope(key_BSKH, self.rope_theta)
    mask_BNTS = None
    if segment_ids_BT is not None:
      same_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
      mask_BNTS = same_BTS[:, None]
    mixed_BTNH = jax.nn.dot_product_attention(
      query_BTNH,
      key_BSKH,
      value_BSKH,
      mask=mask_BNTS,
      is_causal=True,
      implementation=_fused_backend(query_BTNH, mask_BNTS),
    )
    return linear.linear(mixed_BTNH, self.output[...], 2)


def _fused_backend(
  query_BTNH: jax.Array, mask: jax.Array | None
) -> Literal["cudnn"] | None:
  """CuDNN where it applies: NVIDIA, half precision, no explicit mask."""
  half = query_BTNH.dtype in (jnp.bfloat16, jnp.float16)
  fits = query_BTNH.shape[-1] % 8 == 0 and query_BTNH.shape[-1] <= 128
  if jax.default_backend() == "gpu" and half and fits and mask is None:
    return "cudnn"
  return None
