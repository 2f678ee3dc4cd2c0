# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json of Kimi Linear and Kimi K3: MLA, KDA and experts."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from attnres_jax import config as config_lib
from attnres_jax.config import fields as kinds
from attnres_jax.interop import config_table as table
from attnres_jax.interop import decoder_keys

key, fixed, same, ignored = table.key, table.fixed, table.same, table.ignored

_FACTOR = "routed_scaling_factor", "moe.scaling_factor", kinds.Positive


# In `layer_types` of transformers, and ours.
_TYPES = {"linear_attention": "kda", "full_attention": "mla"}
# Published: layers by number, from 1.
_NUMBERS = {"kda_layers": "kda", "full_attn_layers": "mla"}


_BOUND = Annotated[
  float, kinds.Accepted(lambda x: x <= 0, "a number below 0", change=abs)
]


def _kda(head: str, heads: str, conv: str) -> tuple[table.Entry, ...]:
  """The shape of KDA, given the names of its keys."""
  return (
    key(head, "kda.head_width kda.gate_rank"),
    same(heads, "num_heads"),
    key(conv, "kda.conv_width"),
  )


_KDA = _kda("head_dim", "num_heads", "short_conv_kernel_size")
_KDA_OF_TYPES = "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"
_GATES = (
  key("use_full_rank_gate", "kda.full_rank_gate", bool, False),
  table.Entry(
    lambda keys, so_far: {
      "kda.decay_bound": keys.take("gate_lower_bound", _BOUND, 0.0)
    },
    lambda c: {"gate_lower_bound": -c.kda.decay_bound or None},
  ),
)


def _mixers(*shape: table.Entry) -> table.Entry:
  """Which mixers are where, and the shape of KDA."""
  name = "linear_attn_config"

  def read(keys: table.Keys, so_far: Mapping[str, Any]) -> dict[str, Any]:
    count, fields = so_far["num_layers"], dict(so_far)
    inner, entries = keys, _kda(*_KDA_OF_TYPES)
    if keys.has(name):  # As published.
      inner, entries = keys.below(name), shape
      lists = {n: inner.take(n, tuple[int, ...], ()) for n in _NUMBERS}
      if sorted(sum(lists.values(), ())) != list(range(1, count + 1)):
        keys.fail(name, lists, f"each of 1 to {count} once")
      by_number = {i: _NUMBERS[n] for n, some in lists.items() for i in some}
      mixers = [by_number[i] for i in range(1, count + 1)]
    else:
      types = keys.take("layer_types", tuple[str, ...])
      if len(types) != count or not set(types) <= set(_TYPES):
        keys.fail("layer_types", types, f"{count} of {', '.join(_TYPES)}")
      mixers = [_TYPES[layer_type] for layer_type in types]
    for entry in entries:
      fields |= entry.read(inner, fields) or {}
    if inner is not keys:
      inner.finish()
    keys.ignore("layer_types", *_KDA_OF_TYPES)
    fields["mixers"], fields["last_mixer"] = table.pattern(mixers)
    return fields

  def write(config: config_lib.ModelConfig) -> dict[str, Any]:
    mixers = config.sublayer_kinds[::2]
    if not set(mixers) <= {"kda", "mla"}:
      config_lib.fail("model.mixers", config.mixers, "of 'kda' and 'mla'")
    values = {
      name: [i for i, m in enumerate(mixers, 1) if m == mixer]
      for name, mixer in _NUMBERS.items()
    }
    return {name: values | table.write(shape, config)}

  return table.Entry(read, write)


def _read_dense(keys: table.Keys, so_far: Mapping[str, Any]) -> dict[str, Any]:
  """How many layers, the first ones, have a dense MLP."""
  types, count = keys.take("mlp_layer_types", list, []), so_far["num_layers"]
  usual = types.count("dense") if types else 1
  dense = keys.take("first_k_dense_replace", kinds.Count, usual)
  if types and types != ["dense"] * min(dense, count) + ["sparse"] * (
    count - dense
  ):
    keys.fail("mlp_layer_types", types, "'dense' ones first, then 'sparse'")
  return {"moe.dense_layers": dense}


_KIMI = (
  *decoder_keys.COMMON,
  key("rms_norm_eps", "norm_eps", kinds.Positive, 1e-5),
  key("kv_lora_rank", "mla.latent_rank"),
  key("qk_nope_head_dim", "mla.nope_width"),
  key("qk_rope_head_dim", "mla.shared_width"),
  key("v_head_dim", "mla.value_width"),
  same("num_key_value_heads", "num_heads"),
  fixed("mla_use_nope", True),
  fixed("attention_bias", False, written=False),
  fixed("moe_router_activation_func", "sigmoid"),
  fixed("moe_renormalize", True),
  key("moe_intermediate_size", "moe.expert_width"),
  fixed("moe_layer_freq", 1),
  key("num_experts", "moe.num_experts"),
  key("num_experts_per_token", "moe.top_k"),
  key("num_shared_experts", "moe.num_shared"),
  fixed("num_expert_group", 1),
  fixed("topk_group", 1),
  table.Entry(
    _read_dense, lambda c: {"first_k_dense_replace": c.moe.dense_layers}
  ),
  # They describe code, or positions, which these networks do not have.
  ignored(
    "head_dim", "qk_head_dim", "rope_theta", "rope_parameters", "rope_scaling",
    "output_router_logits", "use_grouped_topk",
  ),
)  # fmt: skip
KIMI_LINEAR = (
  *_KIMI,
  decoder_keys.SILU,
  _mixers(*_KDA),
  key(*_FACTOR),
  fixed("q_lora_rank"),
  fixed("num_nextn_predict_layers", 0, written=False),
)


def _situ(name: str, field: str) -> table.Entry:
  """A key that SiTU needs, and no other activation."""
  usual = table.get(config_lib.ActivationConfig(), field)
  return key(
    name, f"activation.{field}", kinds.Positive,
    lambda f: table.REQUIRED if f["activation.name"] == "situ" else usual,
  )  # fmt: skip


def _read_blocks(keys: table.Keys, so_far: Mapping[str, Any]) -> dict[str, Any]:
  """Blocks of config.json count transformer blocks, ours count sublayers."""
  size = 2 * keys.take("attn_res_block_size", kinds.Size)
  return {"residual.block_size": min(size, 2 * so_far["num_layers"])}


def _write_blocks(config: config_lib.ModelConfig) -> dict[str, Any]:
  size = config.residual.block_size
  if config.residual.name != "block_attnres":
    name = config.residual.name
    config_lib.fail("model.residual.name", name, "'block_attnres'")
  if size % 2:
    config_lib.fail("model.residual.block_size", size, "an even number")
  return {"attn_res_block_size": size // 2}


KIMI_K3 = (
  *_KIMI,
  fixed("model_type", "kimi_linear"),
  _mixers(*_KDA, *_GATES),
  key(*_FACTOR, 1.0),
  key("q_lora_rank", "mla.query_rank", kinds.Size, 0, null=0),
  key("mla_use_output_gate", "mla.output_gate", bool, False),
  key("routed_expert_hidden_size", "moe.latent_width", kinds.Size, 0, null=0),
  key("latent_moe_use_norm", "moe.latent_norm", bool, False),
  key("hidden_act", "activation.name", Literal["silu", "situ"], "silu"),
  _situ("activation_situ_beta", "gate_bound"),
  _situ("activation_situ_linear_beta", "up_bound"),
  table.Entry(_read_blocks, _write_blocks),
  # How experts are stored, names of tensors say.
  ignored("quantization_config", "num_nextn_predict_layers"),
)
