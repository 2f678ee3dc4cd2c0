# SPDX-License-Identifier: Apache-2.0
"""Networks whose cost is measured, and arms: one network in several forms.

An arm is a residual scheme with options, each a field of the model, of
`model.residual` or of `model.residual.read`: "prenorm scan_layers=False",
"block_attnres heads=16 depth_loop=scan". One option is no field:
"layers=separate" keeps each layer in separate arrays, as the engine does on
CPUs.
"""

import ast
from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple

import jax

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.models import layer_stacks

_Model = config_lib.ModelConfig


class Network(NamedTuple):
  """A network without its residual scheme, and a batch for it.

  One of a config file has its `run`.
  """

  model: config_lib.ModelConfig
  batch: int = 1
  tokens: int = 1
  run: config_lib.RunConfig = config_lib.RunConfig()


def _of(spec: str, batch: int = 0, **fields: Any) -> Network:
  """The network of a config file, and its batch unless one is given."""
  config = config_lib.load_config(
    spec, {f"model.{name}": value for name, value in fields.items()}
  )
  data = config.data
  rows = batch or data.batch_size
  return Network(config.model, rows, data.sequence_length, config)


def _dense(
  width: int, layers: int, blocks: int, batch: int = 1, tokens: int = 1,
  **fields: Any,
) -> Network:  # fmt: skip
  """A bfloat16 decoder outside of scans, with `blocks` depth blocks."""
  shape: dict[str, Any] = {
    "vocab_size": 32768, "num_heads": width // 128, "dtype": "bfloat16",
    "scan_layers": False, "width": width, "num_layers": layers,
    "residual": config_lib.residual_config(num_blocks=blocks),
  } | fields  # fmt: skip
  return Network(_Model(**shape), batch, tokens)


_BLOCK = ",residual=block_attnres"
_PAPER = "configs/scaling.py:scale=paper,planned,size="
_48B = "configs/kimi_linear.py:size=48b"
NETWORKS: Mapping[str, Callable[[], Network]] = {
  "demo": lambda: _of("configs/lm.py:size=tiny"),
  "large": lambda: _of(
    "configs/lm.py:size=small", 2, **{"residual.num_blocks": 8}
  ),
  "paired": lambda: _of("configs/paired.py:scale=laptop"),
  "tiny": lambda: _dense(128, 1, 1, 1, 32, vocab_size=128),
  "d1024": lambda: _dense(1024, 12, 8, 8, 1024),
  "d2048": lambda: _dense(2048, 16, 8, 8, 1024),
  "short": lambda: _dense(2048, 2, 2, 4, 4096),
  "stack16": lambda: _dense(2048, 8, 4, 4, 4096),
  "stack32": lambda: _dense(2048, 16, 4, 4, 4096),
  # Grouped queries, since caches of all heads would not fit.
  "served": lambda: _dense(2048, 12, 8, num_kv_heads=4, mlp_width=5504),
  "served_here": lambda: _dense(
    256, 4, 4, vocab_size=4096, num_heads=4, mlp_width=688, dtype="float32",
    scan_layers=True,
  ),
  # The width and the blocks of the paper's example of a long prompt (section
  # 4.2), with narrow sublayers: blocks are most of its memory.
  "paper": lambda: _dense(
    7168, 16, 8, vocab_size=1024, num_heads=8, head_width=128, mlp_width=1024,
    scan_layers=True,
  ),
  # The first layers of the 48B network have all kinds of its sublayers.
  "48b": lambda: _of(_48B, 1, num_layers=4),
  # Training runs that have plans, of which `experts` takes a sublayer.
  "194m": lambda: _of(f"{_PAPER}194m{_BLOCK}"),
  "436m": lambda: _of(f"{_PAPER}436m{_BLOCK}"),
  "48b_pod": lambda: _of(_48B + _BLOCK),
  "experts_here": lambda: _dense(
    256, 1, 1, 1, 2048, dtype="float32",
    moe=config_lib.MoeConfig(num_experts=64, expert_width=128),
  ),
}  # fmt: skip


def load(name: str) -> Network:
  """A network by its name.

  Raises:
    ConfigError: there is no such network.
  """
  return config_lib.choose("--networks", name, NETWORKS)()


def with_arm(network: Network, arm: str) -> config_lib.ModelConfig:
  """The model of an arm.

  Raises:
    ConfigError: no model has such an option.
  """
  scheme, options = _parsed(arm)
  model = network.model
  residual = config_lib.under(model.residual, scheme)
  residual_fields = _taken(options, type(residual))
  if isinstance(residual, config_lib.DepthAttentionConfig):
    read = _taken(options, config_lib.DepthReadConfig)
    residual_fields["read"] = dataclasses.replace(residual.read, **read)
  residual = dataclasses.replace(residual, **residual_fields)
  fields = _taken(options, _Model)
  for name in options.keys() - {"layers"}:
    config_lib.fail_argument("--arms", arm, f"no option {name}")
  return dataclasses.replace(model, residual=residual, **fields)


def build(network: Network, arm: str) -> models.Transformer:
  """The network of an arm; its arrays are abstract within `jax.eval_shape`."""
  options = _parsed(arm)[1]
  model = models.build_model(with_arm(network, arm))
  if options.get("layers") == "separate":
    model.sublayers = layer_stacks.separated(model.sublayers)
  return model


def abstract(network: Network, arm: str) -> models.Transformer:
  """The network of `build`, with shapes in place of arrays."""
  return jax.eval_shape(lambda: build(network, arm))


def _parsed(arm: str) -> tuple[str, dict[str, Any]]:
  """The scheme, and the values of its options."""
  scheme, *options = arm.split()
  fields: dict[str, Any] = {}
  for option in options:
    name, _, text = option.partition("=")
    try:
      fields[name] = ast.literal_eval(text)
    except (ValueError, SyntaxError):
      fields[name] = text  # A word.
  return scheme, fields


def _taken(fields: dict[str, Any], kind: Any) -> dict[str, Any]:
  """Removes the options of a kind of config, and returns them."""
  taken = fields.keys() & kind.__dataclass_fields__
  return {name: fields.pop(name) for name in taken}
