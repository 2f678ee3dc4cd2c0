# SPDX-License-Identifier: Apache-2.0
"""Networks of this library in a layout of their own, with a class in PyTorch.

An export has `modeling_attnres.py` beside it, which transformers loads as
remote code. Tensors are named as in Kimi Linear, and queries over depth as in
Kimi K3 (spec: interop). `network` in config.json has the fields of
`ModelConfig`.
"""

from collections.abc import Container
import dataclasses
import pathlib
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax.interop import keys as keys_lib
from attnres_jax.interop import layout
from attnres_jax.interop import rules

_CODE = pathlib.Path(__file__).with_name("modeling_attnres.py")
_SCHEMES = ("prenorm", "full_attnres", "block_attnres")
# Options of reads that the class in PyTorch has; all others at their defaults.
_READ = ("heads", "logit_scale", "scale", "query_init")


class Twin:
  """The family; see `families.Family`."""

  architecture = "AttnResForCausalLM"

  def ignored(
    self, config: config_lib.ModelConfig, names: Container[str]
  ) -> tuple[str, ...]:
    del names
    # A copy of the table, as transformers may save it.
    return (r"lm_head\.weight",) if config.tie_embeddings else ()

  def files(self) -> dict[str, bytes]:
    return {_CODE.name: _CODE.read_bytes()}

  def renamed(self, name: str) -> str:
    return name

  def read_config(self, keys: keys_lib.Keys) -> config_lib.ModelConfig:
    network = keys.take("network", dict)
    config = config_lib.build_run_config(
      {"model": network, "data": {"tokenizer": "ids"}}
    ).model
    for name, value in _generic(config).items():
      keys.expect(name, value)
    keys.ignore("auto_map", "max_position_embeddings")
    _check(config)
    return config

  def write_config(self, config: config_lib.ModelConfig) -> dict[str, Any]:
    _check(config)
    name = _CODE.stem
    return _generic(config) | {
      "network": dataclasses.asdict(config),
      "auto_map": {
        "AutoConfig": f"{name}.AttnResConfig",
        "AutoModelForCausalLM": f"{name}.{self.architecture}",
      },
    }

  def rules(self, config: config_lib.ModelConfig) -> list[rules.Rule]:
    found = layout.rules_of(config)
    if config.residual.name != "prenorm":
      found += layout.of_reads(config)
    return found


def _generic(config: config_lib.ModelConfig) -> dict[str, Any]:
  """What transformers looks for in any config."""
  return dict(
    vocab_size=config.vocab_size,
    hidden_size=config.width,
    num_hidden_layers=config.num_layers,
    num_attention_heads=config.num_heads,
    num_key_value_heads=config.kv_heads,
    tie_word_embeddings=config.tie_embeddings,
  )


def _check(config: config_lib.ModelConfig) -> None:
  """Refuses what the class in PyTorch does not compute.

  Raises:
    ConfigError: names the field.
  """
  residual, default = config.residual, config_lib.DepthReadConfig()
  config_lib.choose(
    "model.residual.name", residual.name, dict.fromkeys(_SCHEMES)
  )
  for field in dataclasses.fields(default):
    value, plain = (
      getattr(residual.read, field.name),
      getattr(default, field.name),
    )
    if field.name not in _READ and value != plain:
      config_lib.fail(f"model.residual.read.{field.name}", value, repr(plain))
  for kind in config.sublayer_kinds:
    config_lib.choose("model.mixers", kind, layout.RULES)
  for name, plain in (("depth_memory", "none"), ("qkv_norm", False)):
    if getattr(config, name) != plain:
      config_lib.fail(f"model.{name}", getattr(config, name), repr(plain))
