# SPDX-License-Identifier: Apache-2.0
"""Rotary positions in config.json: base, scaling, and factors of logits."""

from collections.abc import Mapping
import math
from typing import Annotated, Any

from attnres_jax import config as config_lib
from attnres_jax.config import fields
from attnres_jax.interop import config_table

_BETA_FAST, _BETA_SLOW = 32.0, 1.0
# A base of 1 turns all pairs alike, one of 0 none.
_Base = Annotated[float, fields.Accepted(lambda x: x > 1, "a number above 1")]


def pair(field: str, *, latent: bool = False) -> tuple[Any, Any]:
  """How to read and to write base and scaling; see `config_table.Pair`.

  Keys come from `rope_parameters`, or have the older names.

  Args:
    field: of the base.
    latent: of MLA: logits have a separate factor, `mscale_all_dim`, and so do
      parts without positions.
  """

  def read(keys: config_table.Keys, found: Mapping[str, Any]) -> dict[str, Any]:
    del found
    length = keys.take("max_position_embeddings", fields.Size, 0)
    theta, rope = _read(keys, length, latent)
    return {field: theta} | {f"rope.{name}": rope[name] for name in rope}

  def write(config: config_lib.ModelConfig) -> dict[str, Any]:
    theta = config_table.get(config, field)
    if theta <= 1:
      config_lib.fail(f"model.{field}", theta, "rotary positions, above 1")
    return _written(theta, config.rope, latent)

  return read, write


def _read(
  keys: config_table.Keys, length: int, latent: bool
) -> tuple[float, dict[str, Any]]:
  """The base, and fields of `RopeConfig`.

  Raises:
    ConfigError: a scaling that our attention does not have.
  """
  theta = keys.take("rope_theta", _Base, 0.0)
  name = "rope_parameters"
  if not keys.has(name):
    keys.ignore(name)
    name = "rope_scaling"
  below = keys.below(name)
  inner = below.take("rope_theta", _Base, 0.0)
  if theta and inner and theta != inner:
    keys.fail("rope_theta", theta, f"{inner} as in {name}")
  theta = theta or inner or 10_000.0
  kind = below.take("type", str, "default")
  kind = below.take("rope_type", str, kind)
  if kind not in ("default", "llama3", "yarn"):
    below.fail("rope_type", kind, "'default', 'llama3' or 'yarn'")
  rope: dict[str, Any] = {}
  if kind != "default":
    original = below.take(
      "original_max_position_embeddings", fields.Size, length
    )
    factor = below.take("factor", fields.Positive)
    rope = dict(scaling=kind, factor=factor, original_length=original)
  if kind == "yarn":
    rope |= _of_yarn(below, rope["factor"], latent)
  if kind == "llama3":
    rope |= dict(
      low_turns=below.take("low_freq_factor", fields.Positive),
      high_turns=below.take("high_freq_factor", fields.Positive),
    )
  below.finish()
  # The other key says the same, or is null.
  if name == "rope_parameters":
    keys.expect("rope_scaling")
  return theta, rope


def _of_yarn(
  below: config_table.Keys, factor: float, latent: bool
) -> dict[str, Any]:
  turning = below.take("mscale", fields.NotNegative, 0.0)
  everything = below.take("mscale_all_dim", fields.NotNegative, 0.0)
  both = turning and everything
  usual = _temperature(factor, turning if both else 1.0)
  if both:
    usual /= _temperature(factor, everything)
  turned = below.take("attention_factor", fields.Positive, usual)
  below.expect("truncate", True)
  if latent:
    if not math.isclose(turned, 1.0):
      below.fail(
        "mscale", turning, f"mscale_all_dim={everything} (or attention_factor"
        "=1): other factors of the part with positions cannot be imported",
      )  # fmt: skip
    turned = _temperature(factor, everything)
  return dict(
    high_turns=below.take("beta_fast", fields.Positive, _BETA_FAST),
    low_turns=below.take("beta_slow", fields.Positive, _BETA_SLOW),
    logit_scale=turned**2,
  )


def _temperature(factor: float, scale: float) -> float:
  """YaRN's factor of queries and of keys (arXiv:2309.00071, Eq. 22)."""
  return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _written(
  theta: float, rope: config_lib.RopeConfig, latent: bool
) -> dict[str, Any]:
  """In the form that transformers of before and after version 5 read."""
  if rope.scaling == "none":
    return dict(rope_theta=theta, rope_scaling=None)
  scaling = dict(
    rope_type=rope.scaling,
    factor=rope.factor,
    original_max_position_embeddings=rope.original_length,
  )
  if rope.scaling == "llama3":
    scaling |= dict(
      low_freq_factor=rope.low_turns, high_freq_factor=rope.high_turns
    )
  else:
    scaling |= dict(beta_fast=rope.high_turns, beta_slow=rope.low_turns)
    scaling |= _written_factors(rope, latent)
  return dict(rope_theta=theta, rope_scaling=scaling)


def _written_factors(
  rope: config_lib.RopeConfig, latent: bool
) -> dict[str, float]:
  turned = math.sqrt(rope.logit_scale)
  if not latent:
    # What readers assume has no rounding of a square and its root.
    usual = _temperature(rope.factor, 1.0)
    if math.isclose(turned, usual, rel_tol=1e-12):
      return {}
    return dict(attention_factor=turned)
  if rope.logit_scale == 1 or rope.factor <= 1:
    return dict(attention_factor=1.0)
  if turned < 1:
    config_lib.fail("model.rope.logit_scale", rope.logit_scale, "1 or more")
  scale = (turned - 1) / (0.1 * math.log(rope.factor))
  # Most likely a short number.
  short = round(scale, 9)
  if _temperature(rope.factor, short) ** 2 == rope.logit_scale:
    scale = short
  return dict(mscale=scale, mscale_all_dim=scale)
