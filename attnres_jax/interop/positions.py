# SPDX-License-Identifier: Apache-2.0
"""Rotary positions in config.json: base, scaling, and factors of logits."""

import math
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax.interop import keys as keys_lib

_BETA_FAST, _BETA_SLOW = 32.0, 1.0


def read(
  keys: keys_lib.Keys, length: int, *, latent: bool = False
) -> tuple[float, config_lib.RopeConfig]:
  """Base and scaling, from `rope_parameters` or the older keys.

  Args:
    keys: of the config.json.
    length: its `max_position_embeddings`, where no original length is given.
    latent: of MLA: logits have a factor of their own, `mscale_all_dim`, and
      parts without positions too.

  Raises:
    ConfigError: a scaling that our attention does not have.
  """
  theta = keys.take("rope_theta", float, 0.0)
  name = "rope_parameters"
  if not keys.is_there(name):
    keys.ignore(name)
    name = "rope_scaling"
  below = keys.below(name)
  inner = below.take("rope_theta", float, 0.0)
  if theta and inner and theta != inner:
    keys.fail("rope_theta", theta, f"{inner} as in {name}")
  theta = theta or inner or 10_000.0
  kind = below.take("type", str, "default")
  kind = below.take("rope_type", str, kind)
  if kind not in ("default", "llama3", "yarn"):
    below.fail("rope_type", kind, "'default', 'llama3' or 'yarn'")
  rope = config_lib.RopeConfig()
  if kind != "default":
    original = below.take("original_max_position_embeddings", int, length)
    factor = below.take("factor", float)
    common: dict[str, Any]
    common = dict(scaling=kind, factor=factor, original_length=original)
    more: dict[str, Any]
    more = _of_yarn(below, factor, latent) if kind == "yarn" else {}
    if kind == "llama3":
      more = dict(
        low_turns=below.take("low_freq_factor", float),
        high_turns=below.take("high_freq_factor", float),
      )
    rope = config_lib.RopeConfig(**common, **more)
  below.finish()
  # The other key says the same, or is null.
  if name == "rope_parameters":
    keys.expect("rope_scaling")
  return theta, rope


def _of_yarn(
  below: keys_lib.Keys, factor: float, latent: bool
) -> dict[str, Any]:
  turning = below.take("mscale", float, 0.0)
  everything = below.take("mscale_all_dim", float, 0.0)
  both = turning and everything
  usual = _temperature(factor, turning if both else 1.0)
  if both:
    usual /= _temperature(factor, everything)
  turned = below.take("attention_factor", float, usual)
  below.expect("truncate", True)
  if latent:
    if not math.isclose(turned, 1.0):
      below.fail(
        "mscale", turning, f"mscale_all_dim={everything} (or attention_factor"
        "=1): other factors of the part with positions cannot be imported",
      )  # fmt: skip
    turned = _temperature(factor, everything)
  return dict(
    high_turns=below.take("beta_fast", float, _BETA_FAST),
    low_turns=below.take("beta_slow", float, _BETA_SLOW),
    logit_scale=turned**2,
  )


def _temperature(factor: float, scale: float) -> float:
  """YaRN's factor of queries and of keys (arXiv:2309.00071, Eq. 22)."""
  return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def check(config: config_lib.ModelConfig, *, pairs: str | None) -> None:
  """Refuses positions that no config.json of these families describes.

  Args:
    config: the network.
    pairs: those of the family; None if it has both.

  Raises:
    ConfigError: names the field.
  """
  rope = config.rope
  if pairs is not None and rope.pairs != pairs:
    config_lib.fail("model.rope.pairs", rope.pairs, repr(pairs))
  if rope.scaling != "yarn" and rope.logit_scale != 1:
    accepted = f"1 with model.rope.scaling={rope.scaling!r}"
    config_lib.fail("model.rope.logit_scale", rope.logit_scale, accepted)


def written(
  theta: float, rope: config_lib.RopeConfig, *, latent: bool = False
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
  if rope.logit_scale == 1:
    return dict(attention_factor=1.0)
  scale = (turned - 1) / (0.1 * math.log(rope.factor))
  # Most likely a short number.
  short = round(scale, 9)
  if _temperature(rope.factor, short) ** 2 == rope.logit_scale:
    scale = short
  return dict(mscale=scale, mscale_all_dim=scale)
