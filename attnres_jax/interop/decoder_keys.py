# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json that decoders share: Llama, Qwen and those after them."""

from attnres_jax.config import fields as kinds
from attnres_jax.interop import config_table as table
from attnres_jax.interop import positions

key, fixed, ignored = table.key, table.fixed, table.ignored

COMMON = (
  key("vocab_size", "vocab_size"),
  key("hidden_size", "width"),
  key("num_hidden_layers", "num_layers", kinds.Layers),
  key("num_attention_heads", "num_heads"),
  key("intermediate_size", "mlp_width"),
  key("tie_word_embeddings", "tie_embeddings", bool, False),
  fixed("attention_dropout", 0.0, 0),
  fixed("is_encoder_decoder", False, written=False),
)
SILU = fixed("hidden_act", "silu")

# Softmax attention and SwiGLU.

DECODER = (
  *COMMON,
  SILU,
  key("rms_norm_eps", "norm_eps", kinds.Positive, 1e-6),
  key("num_key_value_heads", "num_kv_heads", default=lambda f: f["num_heads"]),
  fixed("mlp_bias", False, written=False),
  positions.ENTRY,
)
BIASES = key(
  "attention_bias", "attention.qkv_bias attention.output_bias", bool, False
)
HEAD_WIDTH = key(
  "head_dim", "head_width", default=lambda f: f["width"] // f["num_heads"]
)
WINDOWS = (
  fixed("use_sliding_window", False),
  table.Entry(
    lambda keys, so_far: keys.expect(
      "layer_types", ["full_attention"] * so_far["num_layers"]
    )
  ),
  # Without effect unless windows are used.
  ignored("sliding_window", "max_window_layers"),
)
