# SPDX-License-Identifier: Apache-2.0
"""Several softmaxes per read against one, by the start of queries."""

from collections.abc import Mapping, Sequence
import statistics
from typing import Any

from attnres_jax.scaling import pairs
from attnres_jax.sweep.pages import page
from experiments.depth_heads import config
from experiments.pages import readme
from experiments.pages import variants


def contrasts(rows: Sequence[Mapping[str, Any]]) -> str:
  """Variants against each other instead of PreNorm, pair by pair."""
  compared = variants.compare(config.STUDY, rows)
  arms, spread = compared.losses, compared.spread
  losses = {
    key: arms[name] for key, name in config.NAMES.items() if name in arms
  }
  contrasted = {
    f"H = {heads} against 1": ((0, heads), (0, 1)) for heads in config.HEADS[1:]
  }
  for heads in config.COOL_HEADS:
    cool = f"one head at the temperature of {heads}"
    contrasted[f"{cool} against 1"] = (1, heads), (0, 1)
    contrasted[f"H = {heads} against {cool}"] = (0, heads), (1, heads)
  # Of each start of queries: H heads, and one at the temperature of H.
  starts = (config.ZERO, config.COOL), (config.RANDOM, config.COOL_RANDOM)
  by_start = [
    [
      label,
      *(
        _difference(
          losses.get((series[i], ours)), losses.get((series[j], other)), spread
        )
        for series in starts
      ),
    ]
    for label, ((i, ours), (j, other)) in contrasted.items()
  ]
  random, zero = (
    {heads: losses.get((series, heads), {}) for heads in config.HEADS}
    for series in (config.RANDOM, config.ZERO)
  )
  by_heads = [
    [f"H = {heads}", _difference(random[heads], zero[heads], spread)]
    for heads in config.HEADS
  ]
  # Means over networks scatter less than single pairs, so by their own spread.
  means = _difference(_mean(random.values()), _mean(zero.values()), None)
  by_heads.append(["mean of these", means])
  labels = [config.LABELS[series] for series in (config.ZERO, config.RANDOM)]
  return readme.text(
    page.Table(("difference of two arms", *labels), by_start),
    page.Table(("random queries minus zero", "difference"), by_heads),
  )


def _difference(
  arm: Mapping[int, float] | None,
  other: Mapping[int, float] | None,
  spread: pairs.Spread | None,
) -> str:
  """`arm` minus `other`; empty without pairs."""
  apart = pairs.difference(arm or {}, other or {}, spread)
  return page.difference(apart) if apart.by_seed else ""


def _mean(losses: Any) -> dict[int, float]:
  """Over networks, for each seed that all of them have."""
  several = list(losses)
  seeds = sorted(set.intersection(*map(set, several)))
  return {
    seed: statistics.fmean(arm[seed] for arm in several) for seed in seeds
  }


PUBLISHED = variants.published(
  __file__, config.STUDY, [readme.Part(contrasts, "contrasts")]
)
