# SPDX-License-Identifier: Apache-2.0
"""Rotary positions in config.json: base, scaling, and factors of logits."""

from collections.abc import Mapping
import math
from typing import Annotated, Any

from attnres_jax import config as config_lib
from attnres_jax.config import fields
from attnres_jax.interop import config_table

# A base of 1 turns all pairs alike, one of 0 none.
_Base = Annotated[float, fields.Accepted(lambda x: x > 1, "a number above 1")]


_EACH = (
  config_table.key("factor", "rope.factor", fields.Positive),
  config_table.key(
    "original_max_position_embeddings", "rope.original_length",
    default=lambda found: found["rope.original_length"],
  ),
)  # fmt: skip
_SCALINGS = {
  "llama3": (
    *_EACH,
    config_table.key("low_freq_factor", "rope.low_turns", fields.Positive),
    config_table.key("high_freq_factor", "rope.high_turns", fields.Positive),
  ),
  "yarn": (
    *_EACH,
    config_table.key("beta_fast", "rope.high_turns", fields.Positive, 32.0),
    config_table.key("beta_slow", "rope.low_turns", fields.Positive, 1.0),
  ),
}


def entry(field: str, *, latent: bool = False) -> config_table.Entry:
  """Base and scaling of rotary positions.

  Reads the keys of `rope_parameters`, or the older ones, and writes a form that
  transformers reads before and since version 5.

  Args:
    field: of the base.
    latent: of MLA, whose logits have the factor `mscale_all_dim`, also in parts
      without positions.
  """

  def read(keys: config_table.Keys, found: Mapping[str, Any]) -> dict[str, Any]:
    del found
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
    rope: dict[str, Any] = {field: theta or inner or 10_000.0}
    kind = below.take("type", str, "default")
    kind = below.take("rope_type", str, kind)
    if kind not in ("default", *_SCALINGS):
      below.fail("rope_type", kind, "'default', 'llama3' or 'yarn'")
    if kind != "default":
      rope |= {"rope.scaling": kind, "rope.original_length": length}
    for one in _SCALINGS.get(kind, ()):
      rope |= one.read(below, rope) or {}
    if kind == "yarn":
      turned = _read_factor(below, rope["rope.factor"], latent)
      rope["rope.logit_scale"] = turned**2
    below.finish()
    # The other key says the same, or is null.
    if name == "rope_parameters":
      keys.expect("rope_scaling")
    return rope

  def write(config: config_lib.ModelConfig) -> dict[str, Any]:
    theta, rope = config_table.get(config, field), config.rope
    if theta <= 1:
      config_lib.fail(f"model.{field}", theta, "rotary positions, above 1")
    if rope.scaling == "none":
      return dict(rope_theta=theta, rope_scaling=None)
    scaling = {"rope_type": rope.scaling}
    scaling |= config_table.write(_SCALINGS[rope.scaling], config)
    if rope.scaling == "yarn" and latent:
      scaling |= _written_factors(rope)
    return dict(rope_theta=theta, rope_scaling=scaling)

  return config_table.Entry(read, write)


def _read_factor(
  below: config_table.Keys, factor: float, latent: bool
) -> float:
  """YaRN's factor of queries and of keys.

  Raises:
    ConfigError: a factor that our attention does not have.
  """
  below.expect("truncate", True)
  scale = 1.0
  if latent:
    # Otherwise, the part with positions would have a factor of its own.
    scale = below.take("mscale_all_dim", fields.Positive)
    mscale = below.take("mscale", fields.Positive)
    if mscale != scale:
      below.fail("mscale", mscale, f"{scale}, as mscale_all_dim")
  below.expect("attention_factor", 1.0 if latent else _temperature(factor, 1.0))
  return _temperature(factor, scale)


def _temperature(factor: float, scale: float) -> float:
  """YaRN's factor of queries and of keys (arXiv:2309.00071, Eq. 22)."""
  return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _written_factors(rope: config_lib.RopeConfig) -> dict[str, float]:
  """YaRN's factor in MLA; elsewhere it has only one value."""
  turned = math.sqrt(rope.logit_scale)
  if turned <= 1 or rope.factor <= 1:
    config_lib.fail("model.rope.logit_scale", rope.logit_scale, "more than 1")
  scale = (turned - 1) / (0.1 * math.log(rope.factor))
  # Most likely a short number.
  short = round(scale, 9)
  if _temperature(rope.factor, short) ** 2 == rope.logit_scale:
    scale = short
  return dict(mscale=scale, mscale_all_dim=scale)
