# SPDX-License-Identifier: Apache-2.0
"""Families of checkpoints, by the `model_type` of their config.json.

To add one, write its table of keys, and what its tensors are named. Names and
shapes follow transformers 5.23, which writes what was published (Kimi K3: the
published headers, spec: interop section 1).

With bfloat16 activations, transformers' RMSNorm rounds before it multiplies by
the gain, ours after. Routers of Kimi Linear weigh by unbiased scores, as in
later code of the same team: the released file adds its bias to a view of them.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
from typing import Annotated, Any, Literal

from attnres_jax import config as config_lib
from attnres_jax.config import fields as kinds
from attnres_jax.interop import config_table as table
from attnres_jax.interop import layout
from attnres_jax.interop import positions
from attnres_jax.interop import rules

key, fixed, same, ignored = table.key, table.fixed, table.same, table.ignored


@dataclasses.dataclass(frozen=True)
class Family:
  """What is known of a family.

  Attributes:
    architecture: the class of transformers that computes it.
    entries: the keys of its config.json.
    fields: of all its networks, by dotted name.
    names: of its tensors.
    below: the key of the object that describes the network; "" for the whole.
    beside: entries of the whole, if `below` is not "".
    unused: patterns of tensors that do not belong to the network.
    renamed: a pattern of names in some files, and what `names` has for it.
    code: a file beside the weights, if transformers has no class.
  """

  architecture: str
  entries: Sequence[table.Entry]
  fields: Mapping[str, Any]
  names: layout.Names = layout.Names()
  below: str = ""
  beside: Sequence[table.Entry] = ()
  unused: Sequence[str] = ()
  renamed: tuple[str, str] = (r"$^", "")
  code: pathlib.Path | None = None

  def read_config(
    self, values: Mapping[str, Any], where: str = "config.json"
  ) -> config_lib.ModelConfig:
    """The network of a config.json, in float32.

    Raises:
      ConfigError: a key is unknown, or has a value that cannot be imported.
    """
    keys = table.Keys(values, where)
    inner = keys.below(self.below) if self.below else keys
    with table.naming(where):
      config = table.read(self.entries, inner, self.fields)
      table.finish(keys, config, self.beside)
    return config

  def write_config(self, config: config_lib.ModelConfig) -> dict[str, Any]:
    """Its config.json, which reads as the same network.

    Raises:
      ConfigError: the family cannot express the network; names the field.
    """
    values = table.write(self.entries, config)
    values = {self.below: values} if self.below else values
    table.check_same(self.read_config(values), config)
    return values

  def rules(self, config: config_lib.ModelConfig) -> tuple[rules.Rule, ...]:
    """A rule for every leaf."""
    return layout.rules_of(config, self.names)


_PRENORM = {"residual.name": "prenorm"}
_COMMON = (
  key("vocab_size", "vocab_size"),
  key("hidden_size", "width"),
  key("num_hidden_layers", "num_layers", kinds.Layers),
  key("num_attention_heads", "num_heads"),
  key("intermediate_size", "mlp_width"),
  key("tie_word_embeddings", "tie_embeddings", bool, False),
  fixed("attention_dropout", 0.0, 0),
  fixed("is_encoder_decoder", False, written=False),
)
_SILU = fixed("hidden_act", "silu")

# Softmax attention and SwiGLU.

_DECODER = (
  *_COMMON,
  _SILU,
  key("rms_norm_eps", "norm_eps", kinds.Positive, 1e-6),
  key("num_key_value_heads", "num_kv_heads", default=lambda f: f["num_heads"]),
  fixed("mlp_bias", False, written=False),
  positions.ENTRY,
)
_BIASES = key(
  "attention_bias", "attention.qkv_bias attention.output_bias", bool, False
)
_HEAD_WIDTH = key(
  "head_dim", "head_width", default=lambda f: f["width"] // f["num_heads"]
)
_WINDOWS = (
  fixed("use_sliding_window", False),
  table.Entry(
    lambda keys, so_far: keys.expect(
      "layer_types", ["full_attention"] * so_far["num_layers"]
    )
  ),
  # Without effect unless windows are used.
  ignored("sliding_window", "max_window_layers"),
)


# MLA, KDA and experts.

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
  *_COMMON,
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
_KIMI_LINEAR = (
  *_KIMI,
  _SILU,
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


_KIMI_K3 = (
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


# Networks of this library in a layout of ours: the fields that
# `modeling_attnres.py` computes, by the object that has them.
_NETWORK = {
  "": "vocab_size width num_layers mixers last_mixer num_heads num_kv_heads"
  " head_width mlp_width rope_theta norm_eps tie_embeddings logit_soft_cap",
  "attention.": "qkv_bias output_bias qk_norm",
  "rope.": "scaling factor low_turns high_turns original_length",
  "activation.": "name gate_bound up_bound",
  "kda.": "head_width conv_width gate_rank full_rank_gate decay_bound",
  "mla.": "latent_rank nope_width shared_width value_width latent_eps"
  " query_rank output_gate",
  "moe.": "num_experts top_k expert_width num_shared scaling_factor"
  " dense_layers latent_width latent_norm",
  "residual.": "name block_size",
  "residual.read.": "heads logit_scale scale",
}
FIELDS = tuple(p + n for p, names in _NETWORK.items() for n in names.split())
_SCHEMES = ("prenorm", "full_attnres", "block_attnres")
_TWIN = "AttnResForCausalLM"
_CODE = pathlib.Path(__file__).with_name("modeling_attnres.py")
_GENERIC = {
  "vocab_size": "vocab_size", "hidden_size": "width",
  "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
  "num_key_value_heads": "kv_heads", "tie_word_embeddings": "tie_embeddings",
}  # fmt: skip


def _written(config: config_lib.ModelConfig) -> config_lib.ModelConfig:
  """The network with only the fields that are written."""
  shape = table.network(config)
  return table.build({name: table.get(shape, name) for name in FIELDS})


def _read_network(keys: table.Keys, so_far: Any) -> dict[str, Any]:
  del so_far
  config = table.build(config_lib.flatten(keys.take("network", dict)))
  # Exports of earlier versions state all fields.
  table.check_same(_written(config), config)
  for name, field in _GENERIC.items():
    keys.expect(name, table.get(config, field))
  return config_lib.flatten(dataclasses.asdict(config))


def _write_network(config: config_lib.ModelConfig) -> dict[str, Any]:
  config_lib.choose(
    "model.residual.name", config.residual.name, dict.fromkeys(_SCHEMES)
  )
  for kind in config.sublayer_kinds:
    config_lib.choose("model.mixers", kind, layout.KINDS)
  nested = table.nested({name: table.get(config, name) for name in FIELDS})
  classes = {"AutoConfig": "AttnResConfig", "AutoModelForCausalLM": _TWIN}
  return {name: table.get(config, f) for name, f in _GENERIC.items()} | {
    "network": nested,
    "auto_map": {n: f"{_CODE.stem}.{c}" for n, c in classes.items()},
  }


FAMILIES: dict[str, Family] = {
  "llama": Family(
    "LlamaForCausalLM",
    (*_DECODER, _BIASES, _HEAD_WIDTH),
    _PRENORM,
    # Of old files; they follow from the config, and are compared with it.
    unused=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
  ),
  "qwen2": Family(
    "Qwen2ForCausalLM",
    (
      *_DECODER, _HEAD_WIDTH, *_WINDOWS,
      fixed("use_mrope", False, written=False),
    ),
    _PRENORM | {"attention.qkv_bias": True},
  ),
  "qwen3": Family(
    "Qwen3ForCausalLM",
    (*_DECODER, _BIASES, key("head_dim", "head_width", default=128), *_WINDOWS),
    _PRENORM | {"attention.qk_norm": True},
  ),
  "kimi_linear": Family(
    "KimiLinearForCausalLM",
    _KIMI_LINEAR,
    _PRENORM,
    # transformers writes dense MLPs so.
    renamed=(r"block_sparse_moe\.(\w+_proj)\.", r"mlp.\1."),
  ),
  # The fields of `ModelConfig`, which a class in PyTorch reads.
  "attnres": Family(
    _TWIN, (table.Entry(_read_network, _write_network),), {}, code=_CODE
  ),
  "kimi_k3": Family(
    "KimiK3ForConditionalGeneration",
    _KIMI_K3,
    {"residual.name": "block_attnres"},
    layout.Names(prefix="language_model.", padded_a_log=True),
    below="text_config",
    beside=(
      # Of images, and how experts are stored.
      ignored(
        "vision_config", "media_placeholder_token_id", "quantization_config",
        "ignore_index",
      ),
      same("tie_word_embeddings", "tie_embeddings"),
    ),
    unused=(r"vision_tower\..*", r"mm_projector\..*"),
  ),
}  # fmt: skip


def of_config_json(
  values: Mapping[str, Any], where: str = "config.json"
) -> tuple[str, Family]:
  """The family of a config.json, by its name.

  Raises:
    ConfigError: there is no such family, or it is for another task.
  """
  families = ", ".join(FAMILIES)
  name = values.get("model_type")
  if not isinstance(name, str) or name not in FAMILIES:
    config_lib.fail_argument(f"{where}: model_type", name, f"one of {families}")
  family = FAMILIES[name]
  classes = values.get("architectures")
  if classes not in (None, [family.architecture]):
    config_lib.fail_argument(
      f"{where}: architectures", classes, f"[{family.architecture!r}]"
    )
  return name, family


def read_config(
  values: Mapping[str, Any], where: str = "config.json"
) -> config_lib.ModelConfig:
  """The network that a config.json describes, in float32.

  Raises:
    ConfigError: a key is unknown, or has a value that cannot be imported.
  """
  return of_config_json(values, where)[1].read_config(values, where)


def of_network(config: config_lib.ModelConfig) -> str:
  """The name of the first family that can express a network.

  Raises:
    ConfigError: none can; says why each cannot.
  """
  reasons = {}
  for name, family in FAMILIES.items():
    try:
      family.write_config(config)
      return name
    except config_lib.ConfigError as error:
      reasons[name] = str(error)
  raise config_lib.ConfigError("; ".join(
    f"as {name!r}: {reason}" for name, reason in reasons.items()
  ))  # fmt: skip
