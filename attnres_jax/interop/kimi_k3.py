# SPDX-License-Identifier: Apache-2.0
"""Kimi K3, the released network with Block AttnRes, without its vision tower.

What Kimi Linear has, and besides: queries over depth, gates of full rank,
queries of MLA from a latent and a gate of its heads, experts in a latent, SiTU.
Names, shapes and the schedule are those of the published headers (spec: interop
section 1); experts may be stored in four bits (`mxfp4`), which an export is
not. No public class computes these networks on a CPU.

Blocks of config.json count transformer blocks, ours count sublayers.
"""

from collections.abc import Container
import dataclasses
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax.interop import keys as keys_lib
from attnres_jax.interop import kimi_linear
from attnres_jax.interop import layout
from attnres_jax.interop import rules

_PREFIX = "language_model."
_NAMES = layout.Names(padded_a_log=True)
_TEXT = "text_config"


@dataclasses.dataclass(frozen=True)
class KimiK3:
  """The family; see `families.Family`."""

  architecture: str = "KimiK3ForConditionalGeneration"

  def files(self) -> dict[str, bytes]:
    return {}

  def ignored(
    self, config: config_lib.ModelConfig, names: Container[str]
  ) -> tuple[str, ...]:
    del names
    found = (r"vision_tower\..*", r"mm_projector\..*")
    if config.tie_embeddings:
      found += (rf"{_PREFIX}lm_head\.weight",)
    return found

  def renamed(self, name: str) -> str:
    return name

  def read_config(self, keys: keys_lib.Keys) -> config_lib.ModelConfig:
    # Of images, and how experts are stored, which names of tensors say.
    keys.ignore(
        "auto_map", "vision_config", "media_placeholder_token_id",
        "quantization_config", "ignore_index", "max_position_embeddings",
        "model_max_length", "tie_word_embeddings",
    )  # fmt: skip
    text = keys.below(_TEXT)
    layers = text.take("num_hidden_layers", int)
    heads = text.take("num_attention_heads", int)
    # MLA has no positions.
    text.ignore(
        *keys_lib.HARMLESS, "model_type", "architectures", "auto_map",
        "model_max_length", "max_position_embeddings", "head_dim",
        "qk_head_dim", "rope_theta", "rope_parameters", "rope_scaling",
        "output_router_logits", "use_grouped_topk", "quantization_config",
        "num_nextn_predict_layers",
    )  # fmt: skip
    for name, *accepted in (
      ("mla_use_nope", True),
      ("num_key_value_heads", heads),
      ("attention_bias", False),
      ("attention_dropout", 0, 0.0),
      ("moe_router_activation_func", "sigmoid"),
      ("moe_renormalize", True),
      ("num_expert_group", 1),
      ("topk_group", 1),
      ("moe_layer_freq", 1),
    ):
      text.expect(name, *accepted)
    mixers, last, kda = kimi_linear.read_mixers(text, layers, heads, gates=True)
    latent = text.take("routed_expert_hidden_size", int, 0)
    block = text.take("attn_res_block_size", int)
    config = config_lib.ModelConfig(
      vocab_size=text.take("vocab_size", int),
      width=text.take("hidden_size", int),
      num_layers=layers,
      num_heads=heads,
      mixers=mixers,
      last_mixer=last,
      mlp_width=text.take("intermediate_size", int),
      norm_eps=text.take("rms_norm_eps", float, 1e-5),
      tie_embeddings=text.take("tie_word_embeddings", bool, False),
      activation=_read_activation(text),
      kda=kda,
      mla=config_lib.MlaConfig(
        **keys_lib.read_mla(text),
        query_rank=text.take("q_lora_rank", int, 0),
        output_gate=text.take("mla_use_output_gate", bool, False),
      ),
      moe=config_lib.MoeConfig(
        num_experts=text.take("num_experts", int),
        top_k=text.take("num_experts_per_token", int),
        expert_width=text.take("moe_intermediate_size", int),
        num_shared=text.take("num_shared_experts", int),
        scaling_factor=text.take("routed_scaling_factor", float, 1.0),
        dense_layers=kimi_linear.read_dense_layers(text, layers),
        latent_width=latent,
        latent_norm=text.take("latent_moe_use_norm", bool, False)
        and bool(latent),
      ),
      residual=config_lib.ResidualConfig(
        "block_attnres", block_size=min(2 * block, 2 * layers)
      ),
    )
    text.finish()
    return config

  def write_config(self, config: config_lib.ModelConfig) -> dict[str, Any]:
    kinds, moe, mla = config.sublayer_kinds, config.moe, config.mla
    residual = config.residual
    for field, value, accepted in (
      ("mixers", set(kinds[::2]) <= {"kda", "mla"}, True),
      ("residual.name", residual.name, "block_attnres"),
      ("residual.read", residual.read, config_lib.DepthReadConfig()),
      ("depth_memory", config.depth_memory, "none"),
      ("qkv_norm", config.qkv_norm, False),
      ("logit_soft_cap", config.logit_soft_cap, 0),
      ("rope.logit_scale", config.rope.logit_scale, 1),
      ("kda.gate_rank", config.kda.gate_rank, config.kda.head_width),
      ("mla.latent_eps", mla.latent_eps, 1e-6),
      ("mla.rope_theta", mla.rope_theta, 0),
      ("moe.groups", moe.groups, 1),
      ("moe.num_experts", bool(moe.num_experts), True),
    ):
      if value != accepted:
        config_lib.fail(f"model.{field}", value, repr(accepted))
    size = residual.sublayers_per_block(config.num_sublayers)
    if size % 2:
      config_lib.fail("model.residual.block_size", size, "an even number")
    numbers = {
      mixer: [i for i, k in enumerate(kinds[::2], 1) if k == mixer]
      for mixer in ("kda", "mla")
    }
    bound = config.kda.decay_bound
    text = dict(
      model_type="kimi_linear",
      hidden_size=config.width,
      num_hidden_layers=config.num_layers,
      num_attention_heads=config.num_heads,
      num_key_value_heads=config.num_heads,
      intermediate_size=config.mlp_size,
      vocab_size=config.vocab_size,
      rms_norm_eps=config.norm_eps,
      tie_word_embeddings=config.tie_embeddings,
      attn_res_block_size=size // 2,
      mla_use_nope=True,
      mla_use_output_gate=mla.output_gate,
      q_lora_rank=mla.query_rank or None,
      **keys_lib.write_mla(mla),
      num_experts=moe.num_experts,
      num_experts_per_token=moe.top_k,
      moe_intermediate_size=moe.expert_width,
      num_shared_experts=moe.num_shared,
      routed_scaling_factor=moe.scaling_factor,
      routed_expert_hidden_size=moe.latent_width or None,
      latent_moe_use_norm=moe.latent_norm,
      first_k_dense_replace=moe.dense_layers,
      moe_layer_freq=1,
      moe_router_activation_func="sigmoid",
      moe_renormalize=True,
      hidden_act=config.activation.name,
      linear_attn_config=dict(
        head_dim=config.kda.head_width,
        num_heads=config.num_heads,
        short_conv_kernel_size=config.kda.conv_width,
        use_full_rank_gate=config.kda.full_rank_gate,
        gate_lower_bound=-bound if bound else None,
        kda_layers=numbers["kda"],
        full_attn_layers=numbers["mla"],
      ),
    )
    if config.activation.name == "situ":
      text |= dict(
        activation_situ_beta=config.activation.gate_bound,
        activation_situ_linear_beta=config.activation.up_bound,
      )
    return {_TEXT: text}

  def rules(self, config: config_lib.ModelConfig) -> list[rules.Rule]:
    found = layout.rules_of(config, _NAMES) + layout.of_reads(config)
    return [
      dataclasses.replace(rule, names=tuple(_PREFIX + n for n in rule.names))
      for rule in found
    ]


def _read_activation(text: keys_lib.Keys) -> config_lib.ActivationConfig:
  name = text.take("hidden_act", str, "silu")
  if name == "silu":
    text.ignore("activation_situ_beta", "activation_situ_linear_beta")
    return config_lib.ActivationConfig()
  if name != "situ":
    text.fail("hidden_act", name, "'silu' or 'situ'")
  return config_lib.ActivationConfig(
    name="situ",
    gate_bound=text.take("activation_situ_beta", float),
    up_bound=text.take("activation_situ_linear_beta", float),
  )
