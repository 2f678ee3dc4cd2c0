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
import re
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax.config import fields as kinds
from attnres_jax.interop import config_table as table
from attnres_jax.interop import layout
from attnres_jax.interop import positions
from attnres_jax.interop import rules
from attnres_jax.interop.config_table import Fixed
from attnres_jax.interop.config_table import Ignored
from attnres_jax.interop.config_table import Key
from attnres_jax.interop.config_table import Pair
from attnres_jax.interop.config_table import Same


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
    unused: patterns of tensors that do not belong to the network, given the
      config, config.json and the names of all tensors.
    renamed: a pattern of names in some files, and what `names` has for it.
    code: a file beside the weights, if transformers has no class.
  """

  architecture: str
  entries: Sequence[table.Entry]
  fields: Mapping[str, Any]
  names: layout.Names = layout.Names()
  below: str = ""
  beside: Sequence[table.Entry] = ()
  unused: Any = lambda config, values, names: ()
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
    if not self.below:
      return table.read(self.entries, keys, self.fields)
    inner = keys.below(self.below)
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

  def original_name(self, name: str) -> str:
    """The name that `rules` has for a tensor of a file."""
    return re.sub(*self.renamed, name)


_PRENORM = {"residual.name": "prenorm"}
_COMMON = (
  Key("vocab_size", "vocab_size"),
  Key("hidden_size", "width"),
  Key("num_hidden_layers", "num_layers", kinds.Layers),
  Key("num_attention_heads", "num_heads"),
  Key("intermediate_size", "mlp_width"),
  Key("tie_word_embeddings", "tie_embeddings", bool, False),
  Fixed("attention_dropout", 0.0, 0),
  Fixed("is_encoder_decoder", False, written=False),
)
_SILU = Fixed("hidden_act", "silu")


def _eps(default: float) -> Key:
  return Key("rms_norm_eps", "norm_eps", kinds.Positive, default)


# Softmax attention and SwiGLU.


def _head_width(found: Mapping[str, Any]) -> int:
  return found["width"] // found["num_heads"]


def _layer_types(keys: table.Keys, found: Mapping[str, Any]) -> dict[str, Any]:
  keys.expect("layer_types", ["full_attention"] * found["num_layers"])
  return {}


_DECODER = (
  *_COMMON,
  _SILU,
  _eps(1e-6),
  Key("num_key_value_heads", "num_kv_heads", default=lambda f: f["num_heads"]),
  Fixed("mlp_bias", False, written=False),
  Pair(*positions.pair("rope_theta")),
)
_BIASES = Key(
  "attention_bias", ("attention.qkv_bias", "attention.output_bias"), bool, False
)
_HEAD_WIDTH = Key("head_dim", "head_width", default=_head_width)
_WINDOWS = (
  Fixed("use_sliding_window", False),
  Pair(_layer_types, lambda config: {}),
  # Without effect unless windows are used.
  Ignored("sliding_window", "max_window_layers"),
)


def _old_frequencies(config: Any, values: Any, names: Any) -> tuple[str, ...]:
  del config, values, names
  # Of old files; they follow from the config, and are compared with it.
  return (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


# MLA, KDA and experts.

_MLA = (
  Key("kv_lora_rank", "mla.latent_rank"),
  Key("qk_nope_head_dim", "mla.nope_width"),
  Key("qk_rope_head_dim", "mla.shared_width"),
  Key("v_head_dim", "mla.value_width"),
)
_QUERY_RANK = Key("q_lora_rank", "mla.query_rank", kinds.Size, 0, null=0)


def _experts(number: str, top: str, shared: str, scale: Any = None) -> Any:
  default = {} if scale is None else {"default": scale}
  factor = "routed_scaling_factor", "moe.scaling_factor"
  return (
    Key(number, "moe.num_experts"),
    Key(top, "moe.top_k"),
    Key(shared, "moe.num_shared"),
    Key("moe_intermediate_size", "moe.expert_width"),
    Key(*factor, kinds.Positive, **default),
    Fixed("moe_layer_freq", 1),
  )


def _take_second_tokens(keys: table.Keys, found: Any) -> dict[str, Any]:
  del found
  keys.take("num_nextn_predict_layers", kinds.Count, 0)
  return {}


def _second_tokens(config: Any, values: Any, names: Any) -> tuple[str, ...]:
  """Layers that predict the token after the next one, after all others.

  config.json counts them, and each has a matrix that joins two vectors.
  """
  first, count = config.num_layers, values.get("num_nextn_predict_layers") or 0
  layers = range(first, first + min(count, len(names)))
  return tuple(
    rf"model\.layers\.{layer}\..*"
    for layer in layers
    if f"model.layers.{layer}.eh_proj.weight" in names
  )


_DEEPSEEK = (
  *_COMMON,
  _SILU,
  _eps(1e-6),
  *_MLA,
  _QUERY_RANK,
  Same("num_key_value_heads", "num_heads"),
  Fixed("attention_bias", False),
  Fixed("scoring_func", "sigmoid"),
  Fixed("topk_method", "noaux_tc"),
  Fixed("norm_topk_prob", True),
  # Files in eight bits have to be converted to BF16 first.
  Fixed("quantization_config", written=False),
  *_experts("n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
  Key("first_k_dense_replace", "moe.dense_layers", kinds.Count),
  Key("n_group", "moe.groups", kinds.Size, 1),
  Key("topk_group", "moe.top_groups", kinds.Size, 1),
  Key(
    "rope_interleave", "rope.pairs", bool, True,
    words={True: "neighbours", False: "halves"},
  ),
  Pair(*positions.pair("mla.rope_theta", latent=True)),
  # It says which layers to leave out: `_second_tokens`.
  Pair(_take_second_tokens, lambda c: {"num_nextn_predict_layers": 0}),
  # They follow from others, or describe code and training.
  Ignored(
    "ep_size", "head_dim", "qk_head_dim", "num_mtp_layers",
    "output_router_logits", "aux_loss_alpha", "seq_aux",
  ),
)  # fmt: skip

# In `layer_types` of transformers, and ours.
_TYPES = {"linear_attention": "kda", "full_attention": "mla"}
# Published: layers by number, from 1.
_NUMBERS = {"kda_layers": "kda", "full_attn_layers": "mla"}


def _kda_entries(below: bool, gates: bool) -> tuple[table.Entry, ...]:
  """The shape of KDA, in an object of its own (published) or in the whole."""
  names = "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"
  if below:
    names = "head_dim", "num_heads", "short_conv_kernel_size"
  more = (
    Key("use_full_rank_gate", "kda.full_rank_gate", bool, False),
    Pair(_read_bound, _write_bound),
  )
  return (
    Key(names[0], ("kda.head_width", "kda.gate_rank")),
    Same(names[1], "num_heads"),
    Key(names[2], "kda.conv_width"),
    *(more if gates else ()),
  )


def _read_bound(keys: table.Keys, found: Any) -> dict[str, Any]:
  del found
  bound = keys.take("gate_lower_bound", float, 0.0)
  if bound > 0:
    keys.fail("gate_lower_bound", bound, "a number below 0, or null")
  return {"kda.decay_bound": abs(bound)}


def _write_bound(config: config_lib.ModelConfig) -> dict[str, Any]:
  return {"gate_lower_bound": -config.kda.decay_bound or None}


def _mixers(gates: bool) -> Pair:
  """Which mixers are where, and the shape of KDA."""
  name = "linear_attn_config"

  def read(keys: table.Keys, found: Mapping[str, Any]) -> dict[str, Any]:
    count, fields = found["num_layers"], dict(found)
    below = keys.has(name)
    inner = keys.below(name) if below else keys
    if below:
      lists = {n: inner.take(n, tuple[int, ...], ()) for n in _NUMBERS}
      if sorted(sum(lists.values(), ())) != list(range(1, count + 1)):
        keys.fail(name, lists, f"each of 1 to {count} once")
      by_number = {i: _NUMBERS[n] for n, some in lists.items() for i in some}
      mixers = [by_number[i] for i in range(1, count + 1)]
      keys.ignore("layer_types")
    else:
      types = keys.take("layer_types", tuple[str, ...])
      if len(types) != count or not set(types) <= set(_TYPES):
        keys.fail("layer_types", types, f"{count} of {', '.join(_TYPES)}")
      mixers = [_TYPES[one] for one in types]
    for entry in _kda_entries(below, gates and below):
      fields |= entry.read(inner, fields)
    if below:
      inner.finish()
    keys.ignore("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    fields["mixers"], fields["last_mixer"] = table.pattern(mixers)
    return fields

  def write(config: config_lib.ModelConfig) -> dict[str, Any]:
    mixers = config.sublayer_kinds[::2]
    if not set(mixers) <= {"kda", "mla"}:
      config_lib.fail("model.mixers", config.mixers, "of 'kda' and 'mla'")
    values: dict[str, Any] = {
      name: [i for i, m in enumerate(mixers, 1) if m == mixer]
      for name, mixer in _NUMBERS.items()
    }
    for entry in _kda_entries(True, gates):
      values |= entry.write(config)
    return {name: values}

  return Pair(read, write)


def _read_dense(keys: table.Keys, found: Mapping[str, Any]) -> dict[str, Any]:
  """How many layers, the first ones, have a dense MLP."""
  types, count = keys.take("mlp_layer_types", list, []), found["num_layers"]
  usual = types.count("dense") if types else 1
  dense = keys.take("first_k_dense_replace", kinds.Count, usual)
  if types and types != ["dense"] * min(dense, count) + ["sparse"] * (
    count - dense
  ):
    keys.fail("mlp_layer_types", types, "'dense' ones first, then 'sparse'")
  return {"moe.dense_layers": dense}


_DENSE = Pair(
  _read_dense, lambda c: {"first_k_dense_replace": c.moe.dense_layers}
)
_KIMI = (
  *_COMMON,
  _eps(1e-5),
  *_MLA,
  Same("num_key_value_heads", "num_heads"),
  Fixed("mla_use_nope", True),
  Fixed("attention_bias", False, written=False),
  Fixed("moe_router_activation_func", "sigmoid"),
  Fixed("moe_renormalize", True),
  Fixed("num_expert_group", 1),
  Fixed("topk_group", 1),
  _DENSE,
  # They describe code, or positions, which these networks do not have.
  Ignored(
    "head_dim", "qk_head_dim", "rope_theta", "rope_parameters", "rope_scaling",
    "output_router_logits", "use_grouped_topk",
  ),
)  # fmt: skip
_KIMI_LINEAR = (
  *_KIMI,
  _SILU,
  _mixers(gates=False),
  *_experts("num_experts", "num_experts_per_token", "num_shared_experts"),
  Fixed("q_lora_rank"),
  Fixed("num_nextn_predict_layers", 0, written=False),
)


def _read_activation(keys: table.Keys, found: Any) -> dict[str, Any]:
  del found
  name = keys.take("hidden_act", str, "silu")
  bounds = {
    "activation_situ_beta": "gate_bound",
    "activation_situ_linear_beta": "up_bound",
  }
  if name == "silu":
    keys.ignore(*bounds)
    return {}
  if name != "situ":
    keys.fail("hidden_act", name, "'silu' or 'situ'")
  return {"activation.name": name} | {
    f"activation.{field}": keys.take(key, kinds.Positive)
    for key, field in bounds.items()
  }


def _write_activation(config: config_lib.ModelConfig) -> dict[str, Any]:
  activation = config.activation
  if activation.name == "silu":
    return {"hidden_act": "silu"}
  return dict(
    hidden_act=activation.name,
    activation_situ_beta=activation.gate_bound,
    activation_situ_linear_beta=activation.up_bound,
  )


def _read_blocks(keys: table.Keys, found: Mapping[str, Any]) -> dict[str, Any]:
  """Blocks of config.json count transformer blocks, ours count sublayers."""
  size = 2 * keys.take("attn_res_block_size", kinds.Size)
  return {"residual.block_size": min(size, 2 * found["num_layers"])}


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
  Fixed("model_type", "kimi_linear"),
  _mixers(gates=True),
  *_experts("num_experts", "num_experts_per_token", "num_shared_experts", 1.0),
  _QUERY_RANK,
  Key("mla_use_output_gate", "mla.output_gate", bool, False),
  Key("routed_expert_hidden_size", "moe.latent_width", kinds.Size, 0, null=0),
  Key("latent_moe_use_norm", "moe.latent_norm", bool, False),
  Pair(_read_activation, _write_activation),
  Pair(_read_blocks, _write_blocks),
  # How experts are stored, names of tensors say.
  Ignored("quantization_config", "num_nextn_predict_layers"),
)


def _images(config: Any, values: Any, names: Any) -> tuple[str, ...]:
  del config, names
  if values.get("vision_config") is None:
    return ()
  return r"vision_tower\..*", r"mm_projector\..*"


# Networks of this library in a layout of their own: the fields that
# `modeling_attnres.py` computes, by the object that has them.
_NETWORK = {
  "": "vocab_size width num_layers mixers last_mixer num_heads num_kv_heads"
  " head_width mlp_width rope_theta norm_eps tie_embeddings logit_soft_cap",
  "attention.": "qkv_bias output_bias qk_norm",
  "rope.": "scaling factor low_turns high_turns original_length logit_scale"
  " pairs",
  "activation.": "name gate_bound up_bound",
  "kda.": "head_width conv_width gate_rank full_rank_gate decay_bound",
  "mla.": "latent_rank nope_width shared_width value_width latent_eps"
  " query_rank rope_theta output_gate",
  "moe.": "num_experts top_k expert_width num_shared scaling_factor"
  " dense_layers groups top_groups latent_width latent_norm",
  "residual.": "name block_size num_blocks",
  "residual.read.": "heads logit_scale scale",
}
FIELDS = tuple(p + n for p, names in _NETWORK.items() for n in names.split())
_SCHEMES = ("prenorm", "full_attnres", "block_attnres")
_CODE = pathlib.Path(__file__).with_name("modeling_attnres.py")
_GENERIC = {
  "vocab_size": "vocab_size", "hidden_size": "width",
  "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
  "num_key_value_heads": "kv_heads", "tie_word_embeddings": "tie_embeddings",
}  # fmt: skip


class Twin(Family):
  """The fields of `ModelConfig`, which a class in PyTorch reads."""

  def read_config(
    self, values: Mapping[str, Any], where: str = "config.json"
  ) -> config_lib.ModelConfig:
    keys = table.Keys(values, where)
    with table.naming(where):
      config = table.build(config_lib.flatten(keys.take("network", dict)))
      # Exports of earlier versions state all fields.
      table.check_same(self._said(config), config)
    for name, field in _GENERIC.items():
      keys.expect(name, table.get(config, field))
    table.finish(keys, config)
    return config

  def write_config(self, config: config_lib.ModelConfig) -> dict[str, Any]:
    config_lib.choose(
      "model.residual.name", config.residual.name, dict.fromkeys(_SCHEMES)
    )
    for kind in config.sublayer_kinds:
      config_lib.choose("model.mixers", kind, layout.KINDS)
    table.check_same(self._said(config), config)
    nested = table.nested({name: table.get(config, name) for name in FIELDS})
    return {name: table.get(config, f) for name, f in _GENERIC.items()} | {
      "network": nested,
      "auto_map": {
        "AutoConfig": f"{_CODE.stem}.AttnResConfig",
        "AutoModelForCausalLM": f"{_CODE.stem}.{self.architecture}",
      },
    }

  def _said(self, config: config_lib.ModelConfig) -> config_lib.ModelConfig:
    """The network with only the fields that are written."""
    return table.build({name: table.get(config, name) for name in FIELDS})


def _qwen(architecture: str, *entries: table.Entry, **fields: Any) -> Family:
  named = {name.replace("__", "."): value for name, value in fields.items()}
  return Family(
    architecture, (*_DECODER, *entries, *_WINDOWS), _PRENORM | named
  )


FAMILIES: dict[str, Family] = {
  "llama": Family(
    "LlamaForCausalLM",
    (*_DECODER, _BIASES, _HEAD_WIDTH),
    _PRENORM,
    unused=_old_frequencies,
  ),
  "qwen2": _qwen(
    "Qwen2ForCausalLM",
    Pair(lambda keys, found: {"head_width": _head_width(found)}, lambda c: {}),
    attention__qkv_bias=True,
  ),
  "qwen3": _qwen(
    "Qwen3ForCausalLM",
    _BIASES,
    Key("head_dim", "head_width", default=128),
    attention__qk_norm=True,
  ),
  "deepseek_v3": Family(
    "DeepseekV3ForCausalLM",
    _DEEPSEEK,
    _PRENORM | {"mixers": ("mla",)},
    layout.Names(moe="mlp", expert=("gate_proj", "up_proj", "down_proj")),
    unused=_second_tokens,
  ),
  "kimi_linear": Family(
    "KimiLinearForCausalLM",
    _KIMI_LINEAR,
    _PRENORM,
    # transformers writes dense MLPs so.
    renamed=(r"block_sparse_moe\.(\w+_proj)\.", r"mlp.\1."),
  ),
  "attnres": Twin("AttnResForCausalLM", (), {}, code=_CODE),
  "kimi_k3": Family(
    "KimiK3ForConditionalGeneration",
    _KIMI_K3,
    {"residual.name": "block_attnres"},
    layout.Names(prefix="language_model.", padded_a_log=True),
    below="text_config",
    beside=(
      # Of images, and how experts are stored.
      Ignored(
        "vision_config", "media_placeholder_token_id", "quantization_config",
        "ignore_index",
      ),
      Same("tie_word_embeddings", "tie_embeddings"),
    ),
    unused=_images,
  ),
}  # fmt: skip


def of_config_json(
  values: Mapping[str, Any], where: str = "config.json"
) -> tuple[str, Family]:
  """The family of a config.json, by its name.

  Raises:
    ConfigError: there is no such family, or it is for another task.
  """
  known = ", ".join(FAMILIES)
  name = values.get("model_type")
  if not isinstance(name, str) or name not in FAMILIES:
    config_lib.fail_argument(f"{where}: model_type", name, f"one of {known}")
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
