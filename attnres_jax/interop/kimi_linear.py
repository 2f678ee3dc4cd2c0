# SPDX-License-Identifier: Apache-2.0
"""Kimi Linear: KDA, MLA without positions, and fine-grained experts.

Names and shapes of the published 48B files and of transformers 5.23, which
writes the same (certain). config.json says which mixers are where either by
numbers from 1 (`linear_attn_config`, published) or by `layer_types`
(transformers). Router weights are those of unbiased scores, as in later code of
the same team. The released file of the gate adds its bias to a view of them.
"""

from collections.abc import Container, Sequence
import dataclasses
import re
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax.interop import keys as keys_lib
from attnres_jax.interop import layout
from attnres_jax.interop import rules

_TYPES = {"linear_attention": "kda", "full_attention": "mla"}


@dataclasses.dataclass(frozen=True)
class KimiLinear:
  """The family; see `families.Family`."""

  architecture: str = "KimiLinearForCausalLM"

  def ignored(
    self, config: config_lib.ModelConfig, names: Container[str]
  ) -> tuple[str, ...]:
    del names
    return (r"lm_head\.weight",) if config.tie_embeddings else ()

  def files(self) -> dict[str, bytes]:
    return {}

  def renamed(self, name: str) -> str:
    # transformers writes dense MLPs so.
    return re.sub(r"block_sparse_moe\.(\w+_proj)\.", r"mlp.\1.", name)

  def read_config(self, keys: keys_lib.Keys) -> config_lib.ModelConfig:
    layers = keys.take("num_hidden_layers", int)
    heads = keys.take("num_attention_heads", int)
    # None of them changes the function: they describe code, or positions, which
    # these networks do not have.
    keys.ignore(
        "auto_map", "model_max_length", "max_position_embeddings", "head_dim",
        "qk_head_dim", "rope_theta", "rope_parameters", "rope_scaling",
        "output_router_logits", "use_grouped_topk",
    )  # fmt: skip
    for name, *accepted in (
      ("hidden_act", "silu"),
      ("mla_use_nope", True),
      ("num_key_value_heads", heads),
      ("attention_bias", False),
      ("attention_dropout", 0, 0.0),
      ("is_encoder_decoder", False),
      ("q_lora_rank",),
      ("moe_router_activation_func", "sigmoid"),
      ("moe_renormalize", True),
      ("num_expert_group", 1),
      ("topk_group", 1),
      ("moe_layer_freq", 1),
      ("num_nextn_predict_layers", 0),
    ):
      keys.expect(name, *accepted)
    mixers, last, kda = read_mixers(keys, layers, heads)
    return config_lib.ModelConfig(
      vocab_size=keys.take("vocab_size", int),
      width=keys.take("hidden_size", int),
      num_layers=layers,
      num_heads=heads,
      mixers=mixers,
      last_mixer=last,
      mlp_width=keys.take("intermediate_size", int),
      norm_eps=keys.take("rms_norm_eps", float, 1e-5),
      tie_embeddings=keys.take("tie_word_embeddings", bool, False),
      kda=kda,
      mla=config_lib.MlaConfig(
        **keys_lib.read_mla(keys),
      ),
      moe=config_lib.MoeConfig(
        num_experts=keys.take("num_experts", int),
        top_k=keys.take("num_experts_per_token", int),
        expert_width=keys.take("moe_intermediate_size", int),
        num_shared=keys.take("num_shared_experts", int),
        scaling_factor=keys.take("routed_scaling_factor", float),
        dense_layers=read_dense_layers(keys, layers),
      ),
      residual=config_lib.ResidualConfig(name="prenorm"),
    )

  def write_config(self, config: config_lib.ModelConfig) -> dict[str, Any]:
    kinds = config.sublayer_kinds
    for field, value, accepted in (
      ("mixers", set(kinds[::2]) <= {"kda", "mla"}, True),
      ("residual.name", config.residual.name, "prenorm"),
      ("depth_memory", config.depth_memory, "none"),
      ("qkv_norm", config.qkv_norm, False),
      ("logit_soft_cap", config.logit_soft_cap, 0),
      ("moe.num_experts", bool(config.moe.num_experts), True),
      ("moe.num_shared", bool(config.moe.num_shared), True),
      ("kda.gate_rank", config.kda.gate_rank, config.kda.head_width),
      ("mla.latent_eps", config.mla.latent_eps, 1e-6),
      ("mla.query_rank", config.mla.query_rank, 0),
      ("mla.rope_theta", config.mla.rope_theta, 0),
      ("mla.output_gate", config.mla.output_gate, False),
      ("moe.groups", config.moe.groups, 1),
      ("moe.latent_width", config.moe.latent_width, 0),
      ("kda.full_rank_gate", config.kda.full_rank_gate, False),
      ("kda.decay_bound", config.kda.decay_bound, 0),
      ("activation.name", config.activation.name, "silu"),
      ("rope.logit_scale", config.rope.logit_scale, 1),
    ):
      if value != accepted:
        wrong = config_lib.flatten(dataclasses.asdict(config))[field]
        config_lib.fail(f"model.{field}", wrong, _accepted(field, accepted))
    numbers = {
      mixer: [i for i, k in enumerate(kinds[::2], 1) if k == mixer]
      for mixer in ("kda", "mla")
    }
    moe, mla = config.moe, config.mla
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
      mla_use_nope=True,
      q_lora_rank=None,
      **keys_lib.write_mla(mla),
      num_experts=moe.num_experts,
      num_experts_per_token=moe.top_k,
      moe_intermediate_size=moe.expert_width,
      num_shared_experts=moe.num_shared,
      routed_scaling_factor=moe.scaling_factor,
      first_k_dense_replace=moe.dense_layers,
      moe_layer_freq=1,
      moe_router_activation_func="sigmoid",
      moe_renormalize=True,
      num_expert_group=1,
      topk_group=1,
      linear_attn_config=dict(
        head_dim=config.kda.head_width,
        num_heads=config.num_heads,
        short_conv_kernel_size=config.kda.conv_width,
        kda_layers=numbers["kda"],
        full_attn_layers=numbers["mla"],
      ),
    )

  def rules(self, config: config_lib.ModelConfig) -> list[rules.Rule]:
    return layout.rules_of(config)


def read_mixers(
  keys: keys_lib.Keys, layers: int, heads: int, *, gates: bool = False
) -> tuple[tuple[str, ...], str, config_lib.KdaConfig]:
  """`mixers`, `last_mixer` and `kda` of a network.

  Args:
    keys: of the config.json.
    layers: their number.
    heads: of each.
    gates: whether the family has those of Kimi K3.

  Raises:
    ConfigError: not every layer has one mixer, or heads differ.
  """
  more: dict[str, Any] = {}
  if keys.is_there("linear_attn_config"):
    below = keys.below("linear_attn_config")
    width = below.take("head_dim", int)
    below.expect("num_heads", heads)
    taps = below.take("short_conv_kernel_size", int)
    numbers = {
      "kda": below.take("kda_layers", list),
      "mla": below.take("full_attn_layers", list),
    }
    if gates:
      more["full_rank_gate"] = below.take("use_full_rank_gate", bool, False)
      bound = below.take("gate_lower_bound", float, 0.0)
      if bound > 0:
        below.fail("gate_lower_bound", bound, "a number below 0, or null")
      more["decay_bound"] = abs(bound)
    below.finish()
    keys.ignore("layer_types")
    if sorted(n for some in numbers.values() for n in some) != list(
      range(1, layers + 1)
    ):
      keys.fail("linear_attn_config", numbers, f"each of 1 to {layers} once")
    kinds = [
      "kda" if i in numbers["kda"] else "mla" for i in range(1, layers + 1)
    ]
  else:
    types = keys.take("layer_types", list)
    if len(types) != layers or not set(types) <= set(_TYPES):
      keys.fail("layer_types", types, f"{layers} of {', '.join(_TYPES)}")
    kinds = [_TYPES[one] for one in types]
    width = keys.take("linear_head_dim", int)
    keys.expect("linear_num_heads", heads)
    taps = keys.take("linear_conv_kernel_dim", int)
  keys.ignore("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
  shape = config_lib.KdaConfig(
    head_width=width, conv_width=taps, gate_rank=width, **more
  )
  return *_pattern(kinds), shape


def _pattern(kinds: Sequence[str]) -> tuple[tuple[str, ...], str]:
  """The shortest pattern that repeats, and the last mixer if it differs."""
  count = len(kinds)
  for size in range(1, count + 1):
    same = [kinds[i] == kinds[i % size] for i in range(count)]
    if all(same) and count % size == 0:
      return tuple(kinds[:size]), ""
    if all(same[:-1]):
      return tuple(kinds[:size]), kinds[-1]
  raise ValueError("there are no mixers")


def read_dense_layers(keys: keys_lib.Keys, layers: int) -> int:
  """How many layers, the first ones, have a dense MLP."""
  types = keys.take("mlp_layer_types", list, [])
  if not types:
    return keys.take("first_k_dense_replace", int, 1)
  dense = keys.take("first_k_dense_replace", int, types.count("dense"))
  if types != ["dense"] * dense + ["sparse"] * (layers - dense):
    keys.fail("mlp_layer_types", types, "'dense' ones first, then 'sparse'")
  return dense


def _accepted(field: str, accepted: Any) -> str:
  words = {
    "mixers": "'kda' and 'mla'",
    "moe.num_experts": "a number above 0",
    "moe.num_shared": "a number above 0",
  }
  return words.get(field, repr(accepted))
