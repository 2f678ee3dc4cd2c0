# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3: MLA with positions and a latent of queries; groups of experts.

Names and shapes of the published files and of transformers 5.23, which writes
the same (certain). Layers that predict a second token, which published files
have after the others, are left out.
"""

from collections.abc import Container
import dataclasses
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax.interop import keys as keys_lib
from attnres_jax.interop import layout
from attnres_jax.interop import positions
from attnres_jax.interop import rules

_NAMES = layout.Names(
  moe="mlp.",
  expert={"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
)


@dataclasses.dataclass(frozen=True)
class DeepseekV3:
  """The family; see `families.Family`."""

  architecture: str = "DeepseekV3ForCausalLM"

  def files(self) -> dict[str, bytes]:
    return {}

  def ignored(
    self, config: config_lib.ModelConfig, names: Container[str]
  ) -> tuple[str, ...]:
    found = (r"lm_head\.weight",) if config.tie_embeddings else ()
    # A layer that predicts the token after the next one joins two vectors.
    layer = config.num_layers
    while f"model.layers.{layer}.eh_proj.weight" in names:
      found += (rf"model\.layers\.{layer}\..*",)
      layer += 1
    return found

  def renamed(self, name: str) -> str:
    return name

  def read_config(self, keys: keys_lib.Keys) -> config_lib.ModelConfig:
    heads = keys.take("num_attention_heads", int)
    # They follow from others, or describe code and training.
    keys.ignore(
        "auto_map", "ep_size", "head_dim", "qk_head_dim",
        "num_nextn_predict_layers", "num_mtp_layers", "output_router_logits",
        "aux_loss_alpha", "seq_aux",
    )  # fmt: skip
    if keys.is_there("quantization_config"):
      found = keys.take("quantization_config", dict)
      keys.fail(
        "quantization_config", found,
        "nothing: files in eight bits have to be converted to BF16 first",
      )  # fmt: skip
    keys.ignore("quantization_config")
    for name, *accepted in (
      ("hidden_act", "silu"),
      ("num_key_value_heads", heads),
      ("attention_bias", False),
      ("attention_dropout", 0, 0.0),
      ("is_encoder_decoder", False),
      ("scoring_func", "sigmoid"),
      ("topk_method", "noaux_tc"),
      ("norm_topk_prob", True),
      ("moe_layer_freq", 1),
    ):
      keys.expect(name, *accepted)
    length = keys.take("max_position_embeddings", int, 0)
    neighbours = keys.take("rope_interleave", bool, True)
    theta, rope = positions.read(keys, length, latent=True)
    pairs = "neighbours" if neighbours else "halves"
    return config_lib.ModelConfig(
      vocab_size=keys.take("vocab_size", int),
      width=keys.take("hidden_size", int),
      num_layers=keys.take("num_hidden_layers", int),
      num_heads=heads,
      mixers=("mla",),
      mlp_width=keys.take("intermediate_size", int),
      norm_eps=keys.take("rms_norm_eps", float, 1e-6),
      tie_embeddings=keys.take("tie_word_embeddings", bool, False),
      rope=dataclasses.replace(rope, pairs=pairs),
      mla=config_lib.MlaConfig(
        **keys_lib.read_mla(keys),
        query_rank=keys.take("q_lora_rank", int, 0),
        rope_theta=theta,
      ),
      moe=config_lib.MoeConfig(
        num_experts=keys.take("n_routed_experts", int),
        top_k=keys.take("num_experts_per_tok", int),
        expert_width=keys.take("moe_intermediate_size", int),
        num_shared=keys.take("n_shared_experts", int),
        scaling_factor=keys.take("routed_scaling_factor", float),
        dense_layers=keys.take("first_k_dense_replace", int),
        groups=keys.take("n_group", int, 1),
        top_groups=keys.take("topk_group", int, 1),
      ),
      residual=config_lib.ResidualConfig(name="prenorm"),
    )

  def write_config(self, config: config_lib.ModelConfig) -> dict[str, Any]:
    mla, moe = config.mla, config.moe
    for field, value, accepted in (
      ("mixers", sorted(set(config.sublayer_kinds[::2])), ["mla"]),
      ("residual.name", config.residual.name, "prenorm"),
      ("depth_memory", config.depth_memory, "none"),
      ("qkv_norm", config.qkv_norm, False),
      ("logit_soft_cap", config.logit_soft_cap, 0),
      ("activation.name", config.activation.name, "silu"),
      ("mla.latent_eps", mla.latent_eps, 1e-6),
      ("mla.output_gate", mla.output_gate, False),
      ("moe.latent_width", moe.latent_width, 0),
    ):
      if value != accepted:
        config_lib.fail(f"model.{field}", value, repr(accepted))
    for field, value in (
      ("moe.num_experts", moe.num_experts),
      ("moe.num_shared", moe.num_shared),
      ("mla.rope_theta", mla.rope_theta),
    ):
      if not value:
        config_lib.fail(f"model.{field}", value, "a number above 0")
    positions.check(config, pairs=None)
    return dict(
      hidden_size=config.width,
      num_hidden_layers=config.num_layers,
      num_attention_heads=config.num_heads,
      num_key_value_heads=config.num_heads,
      intermediate_size=config.mlp_size,
      vocab_size=config.vocab_size,
      hidden_act="silu",
      rms_norm_eps=config.norm_eps,
      tie_word_embeddings=config.tie_embeddings,
      attention_bias=False,
      attention_dropout=0.0,
      q_lora_rank=mla.query_rank or None,
      **keys_lib.write_mla(mla),
      rope_interleave=config.rope.pairs == "neighbours",
      n_routed_experts=moe.num_experts,
      num_experts_per_tok=moe.top_k,
      moe_intermediate_size=moe.expert_width,
      n_shared_experts=moe.num_shared,
      routed_scaling_factor=moe.scaling_factor,
      first_k_dense_replace=moe.dense_layers,
      n_group=moe.groups,
      topk_group=moe.top_groups,
      norm_topk_prob=True,
      scoring_func="sigmoid",
      topk_method="noaux_tc",
      moe_layer_freq=1,
      num_nextn_predict_layers=0,
      **positions.written(mla.rope_theta, config.rope, latent=True),
    )

  def rules(self, config: config_lib.ModelConfig) -> list[rules.Rule]:
    return layout.rules_of(config, _NAMES)
