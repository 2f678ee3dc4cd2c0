# SPDX-License-Identifier: Apache-2.0
"""Families of checkpoints, by the `model_type` of their config.json.

A family reads a config.json as a network, writes it, and lists which tensors
make up which leaf. To add one, write such an object and a line in `FAMILIES`.
"""

from collections.abc import Container, Mapping
from typing import Any, Protocol

from attnres_jax import config as config_lib
from attnres_jax.interop import decoder
from attnres_jax.interop import deepseek
from attnres_jax.interop import keys as keys_lib
from attnres_jax.interop import kimi_k3
from attnres_jax.interop import kimi_linear
from attnres_jax.interop import rules
from attnres_jax.interop import twin


class Family(Protocol):
  """What is known of a family."""

  @property
  def architecture(self) -> str:
    """The class of transformers that computes it."""
    ...

  def read_config(self, keys: keys_lib.Keys) -> config_lib.ModelConfig:
    """The network; takes every key that it understands."""
    ...

  def write_config(self, config: config_lib.ModelConfig) -> dict[str, Any]:
    """Its config.json.

    Raises:
      ConfigError: the family cannot express the network; names the field.
    """
    ...

  def rules(self, config: config_lib.ModelConfig) -> list[rules.Rule]:
    """A rule for every leaf."""
    ...

  def files(self) -> dict[str, bytes]:
    """Code that has to be beside the weights, if transformers has no class."""
    ...

  def ignored(
    self, config: config_lib.ModelConfig, names: Container[str]
  ) -> tuple[str, ...]:
    """Patterns of tensors that are not needed, given the names of all."""
    ...

  def renamed(self, name: str) -> str:
    """The name that `rules` has for a tensor; some files have another."""
    ...


FAMILIES: dict[str, Family] = {
  "llama": decoder.Decoder("LlamaForCausalLM", decoder.LLAMA),
  "qwen2": decoder.Decoder("Qwen2ForCausalLM", decoder.QWEN2),
  "qwen3": decoder.Decoder("Qwen3ForCausalLM", decoder.QWEN3),
  "deepseek_v3": deepseek.DeepseekV3(),
  "kimi_linear": kimi_linear.KimiLinear(),
  "attnres": twin.Twin(),
  "kimi_k3": kimi_k3.KimiK3(),
}


def of_config_json(values: Mapping[str, Any]) -> tuple[str, Family]:
  """The family of a config.json, by its name.

  Raises:
    ConfigError: there is no such family, or it is for another task.
  """
  known = ", ".join(FAMILIES)
  name = values.get("model_type")
  if not isinstance(name, str) or name not in FAMILIES:
    config_lib.fail_argument("config.json: model_type", name, f"one of {known}")
  family = FAMILIES[name]
  classes = values.get("architectures")
  if classes not in (None, [family.architecture]):
    config_lib.fail_argument(
      "config.json: architectures", classes, f"[{family.architecture!r}]"
    )
  return name, family


def read_config(values: Mapping[str, Any]) -> config_lib.ModelConfig:
  """The network that a config.json describes, in float32.

  Raises:
    ConfigError: a key is unknown, or has a value that cannot be imported.
  """
  _, family = of_config_json(values)
  keys = keys_lib.Keys(values)
  keys.ignore("model_type", "architectures", *keys_lib.HARMLESS)
  config = family.read_config(keys)
  keys.finish()
  return config


def of_network(config: config_lib.ModelConfig) -> str:
  """The name of the first family that can express a network.

  Raises:
    ConfigError: none can; says why the one that came furthest cannot.
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
