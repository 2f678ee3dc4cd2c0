# SPDX-License-Identifier: Apache-2.0
"""Rotary positions in config.json: their base and scaling."""

from collections.abc import Mapping
from typing import Annotated, Any

from attnres_jax import config as config_lib
from attnres_jax.config import fields
from attnres_jax.interop import config_table

# A base of 1 turns all pairs alike, one of 0 none.
_Base = Annotated[float, fields.Accepted(lambda x: x > 1, "a number above 1")]


_LLAMA3 = (
  config_table.key("factor", "rope.factor", fields.Positive),
  config_table.key(
    "original_max_position_embeddings", "rope.original_length",
    default=lambda so_far: so_far["rope.original_length"],
  ),
  config_table.key("low_freq_factor", "rope.low_turns", fields.Positive),
  config_table.key("high_freq_factor", "rope.high_turns", fields.Positive),
)  # fmt: skip


def _read(keys: config_table.Keys, so_far: Mapping[str, Any]) -> dict[str, Any]:
  del so_far
  length = keys.take("max_position_embeddings", fields.Size, 0)
  theta = keys.take("rope_theta", _Base, 0.0)
  name = "rope_parameters"
  if not keys.has(name):
    keys.ignore(name)
    name = "rope_scaling"
  below = keys.below(name)
  inner = below.take("rope_theta", _Base, 0.0)
  if theta and inner and theta != inner:
    keys.fail("rope_theta", theta, f"{inner} as in {name}")
  rope: dict[str, Any] = {"rope_theta": theta or inner or 10_000.0}
  kind = below.take("type", str, "default")
  kind = below.take("rope_type", str, kind)
  if kind not in ("default", "llama3"):
    below.fail("rope_type", kind, "'default' or 'llama3'")
  if kind == "llama3":
    rope |= {"rope.scaling": kind, "rope.original_length": length}
    for entry in _LLAMA3:
      rope |= entry.read(below, rope) or {}
  below.finish()
  # The other key says the same, or is null.
  if name == "rope_parameters":
    keys.expect("rope_scaling")
  return rope


def _write(config: config_lib.ModelConfig) -> dict[str, Any]:
  theta, rope = config.rope_theta, config.rope
  if theta <= 1:
    config_lib.fail("model.rope_theta", theta, "rotary positions, above 1")
  if rope.scaling == "none":
    return dict(rope_theta=theta, rope_scaling=None)
  scaling = {"rope_type": rope.scaling} | config_table.write(_LLAMA3, config)
  return dict(rope_theta=theta, rope_scaling=scaling)


# Reads the keys of `rope_parameters`, or the older ones, and writes a form that
# transformers reads before and since version 5.
ENTRY = config_table.Entry(_read, _write)
