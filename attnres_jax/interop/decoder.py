# SPDX-License-Identifier: Apache-2.0
"""Llama, Qwen2 and Qwen3: softmax attention and SwiGLU, plain residuals.

They differ in biases, norms of queries and keys, and keys of config.json.
Names and shapes as in transformers 5.23 and in published files (certain). With
bfloat16 activations, its RMSNorm rounds before it multiplies by the gain, ours
after, so results differ by that rounding.
"""

from collections.abc import Container
import dataclasses
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax.interop import keys as keys_lib
from attnres_jax.interop import layout
from attnres_jax.interop import positions
from attnres_jax.interop import rules


@dataclasses.dataclass(frozen=True)
class Variant:
  """Where the families differ.

  Attributes:
    qkv_bias: whether queries, keys and values always have biases.
    bias_key: whether `attention_bias` gives biases to them and to the output.
    qk_norm: whether queries and keys have norms.
    windows: whether config.json has keys of sliding windows.
    head_dim: if config.json may lack it, what it is then; 0 for width / heads,
      None if it has no such key.
  """

  qkv_bias: bool = False
  bias_key: bool = False
  qk_norm: bool = False
  windows: bool = False
  head_dim: int | None = 0


LLAMA = Variant(bias_key=True)
QWEN2 = Variant(qkv_bias=True, windows=True, head_dim=None)
QWEN3 = Variant(bias_key=True, qk_norm=True, windows=True, head_dim=128)


@dataclasses.dataclass(frozen=True)
class Decoder:
  """A family; see `families.Family`."""

  architecture: str
  variant: Variant

  def files(self) -> dict[str, bytes]:
    return {}

  def ignored(
    self, config: config_lib.ModelConfig, names: Container[str]
  ) -> tuple[str, ...]:
    del names
    # Of old files: frequencies, which follow from the config.
    found = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    # A copy of the table.
    return (*found, r"lm_head\.weight") if config.tie_embeddings else found

  def renamed(self, name: str) -> str:
    return name

  def read_config(self, keys: keys_lib.Keys) -> config_lib.ModelConfig:
    variant = self.variant
    layers = keys.take("num_hidden_layers", int)
    heads = keys.take("num_attention_heads", int)
    width = keys.take("hidden_size", int)
    head = 0
    if variant.head_dim is not None:
      head = keys.take("head_dim", int, variant.head_dim)
    if not head and heads > 0:
      head = width // heads
    keys.expect("hidden_act", "silu")
    keys.expect("mlp_bias", False)
    keys.expect("attention_dropout", 0, 0.0)
    keys.expect("is_encoder_decoder", False)
    if variant.windows:
      keys.expect("use_sliding_window", False)
      keys.expect("layer_types", ["full_attention"] * layers)
      # Without effect unless windows are used.
      keys.ignore("sliding_window", "max_window_layers")
    bias = variant.bias_key and keys.take("attention_bias", bool, False)
    length = keys.take("max_position_embeddings", int, 0)
    theta, rope = positions.read(keys, length)
    return config_lib.ModelConfig(
      vocab_size=keys.take("vocab_size", int),
      width=width,
      num_layers=layers,
      num_heads=heads,
      num_kv_heads=keys.take("num_key_value_heads", int, heads),
      head_width=head,
      mlp_width=keys.take("intermediate_size", int),
      rope_theta=theta,
      rope=rope,
      norm_eps=keys.take("rms_norm_eps", float, 1e-6),
      tie_embeddings=keys.take("tie_word_embeddings", bool, False),
      attention=config_lib.AttentionConfig(
        qkv_bias=variant.qkv_bias or bias,
        output_bias=bias,
        qk_norm=variant.qk_norm,
      ),
      residual=config_lib.ResidualConfig(name="prenorm"),
    )

  def write_config(self, config: config_lib.ModelConfig) -> dict[str, Any]:
    variant, attention = self.variant, config.attention
    if not config.rope_theta:
      config_lib.fail("model.rope_theta", 0, "rotary positions")
    for field, value, accepted in (
      ("mixers", set(config.sublayer_kinds[::2]), {"attention"}),
      ("moe.num_experts", config.moe.num_experts, 0),
      ("residual.name", config.residual.name, "prenorm"),
      ("depth_memory", config.depth_memory, "none"),
      ("qkv_norm", config.qkv_norm, False),
      ("logit_soft_cap", config.logit_soft_cap, 0),
      ("activation.name", config.activation.name, "silu"),
      ("attention.qk_norm", attention.qk_norm, variant.qk_norm),
    ):
      if value != accepted:
        config_lib.fail(f"model.{field}", value, repr(accepted))
    self._check_biases(attention)
    positions.check(config, pairs="halves")
    if variant.head_dim is None and (
      config.head_size * config.num_heads != config.width
    ):
      config_lib.fail(
        "model.head_width", config.head_width, "model.width / model.num_heads"
      )
    values = dict(
      hidden_size=config.width,
      num_hidden_layers=config.num_layers,
      num_attention_heads=config.num_heads,
      num_key_value_heads=config.kv_heads,
      intermediate_size=config.mlp_size,
      vocab_size=config.vocab_size,
      hidden_act="silu",
      rms_norm_eps=config.norm_eps,
      tie_word_embeddings=config.tie_embeddings,
      attention_dropout=0.0,
      **positions.written(config.rope_theta, config.rope),
    )
    if variant.head_dim is not None:
      values["head_dim"] = config.head_size
    if variant.bias_key:
      values["attention_bias"] = attention.qkv_bias
    if variant.windows:
      values["use_sliding_window"] = False
    return values

  def rules(self, config: config_lib.ModelConfig) -> list[rules.Rule]:
    return layout.rules_of(config)

  def _check_biases(self, attention: config_lib.AttentionConfig) -> None:
    """Refuses biases that no value of `attention_bias` describes."""
    qkv, output = attention.qkv_bias, attention.output_bias
    if self.variant.bias_key:
      if qkv != output:
        accepted = f"as model.attention.output_bias={output}"
        config_lib.fail("model.attention.qkv_bias", qkv, accepted)
      return
    if qkv != self.variant.qkv_bias:
      config_lib.fail("model.attention.qkv_bias", qkv, repr(not qkv))
    if output:
      config_lib.fail("model.attention.output_bias", True, "False")
