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
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax.interop import attnres_keys
from attnres_jax.interop import config_table as table
from attnres_jax.interop import decoder_keys
from attnres_jax.interop import kimi_keys
from attnres_jax.interop import layout
from attnres_jax.interop import rules

key, fixed, same, ignored = table.key, table.fixed, table.same, table.ignored
DECODER, BIASES = decoder_keys.DECODER, decoder_keys.BIASES
HEAD_WIDTH, WINDOWS = decoder_keys.HEAD_WIDTH, decoder_keys.WINDOWS


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
    code: files beside the weights, if transformers has no class.
  """

  architecture: str
  entries: Sequence[table.Entry]
  fields: Mapping[str, Any]
  names: layout.Names = layout.Names()
  below: str = ""
  beside: Sequence[table.Entry] = ()
  unused: Sequence[str] = ()
  renamed: tuple[str, str] = (r"$^", "")
  code: Sequence[pathlib.Path] = ()

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

FAMILIES: dict[str, Family] = {
  "llama": Family(
    "LlamaForCausalLM",
    (*DECODER, BIASES, HEAD_WIDTH),
    _PRENORM,
    # Of old files; they follow from the config.
    unused=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
  ),
  "qwen2": Family(
    "Qwen2ForCausalLM",
    (
      *DECODER, HEAD_WIDTH, *WINDOWS,
      fixed("use_mrope", False, written=False),
    ),
    _PRENORM | {"attention.qkv_bias": True},
  ),
  "qwen3": Family(
    "Qwen3ForCausalLM",
    (*DECODER, BIASES, key("head_dim", "head_width", default=128), *WINDOWS),
    _PRENORM | {"attention.qk_norm": True},
  ),
  "kimi_linear": Family(
    "KimiLinearForCausalLM",
    kimi_keys.KIMI_LINEAR,
    _PRENORM,
    # transformers writes dense MLPs so.
    renamed=(r"block_sparse_moe\.(\w+_proj)\.", r"mlp.\1."),
  ),
  # The fields of `ModelConfig`, which a class in PyTorch reads.
  "attnres": Family(
    attnres_keys.CLASS, (attnres_keys.ENTRY,), {}, code=attnres_keys.CODE
  ),
  "kimi_k3": Family(
    "KimiK3ForConditionalGeneration",
    kimi_keys.KIMI_K3,
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
