# SPDX-License-Identifier: Apache-2.0
"""Several softmaxes per read against one, by the start of queries."""

from collections.abc import Iterable, Mapping, Sequence
import functools
from typing import Any

import pandas as pd

from attnres_jax.scaling import pairs
from attnres_jax.sweep.pages import page
from experiments.depth_heads import config
from experiments.pages import readme
from experiments.pages import variants


def contrasts(rows: Sequence[Mapping[str, Any]]) -> str:
  """Variants against each other instead of PreNorm, pair by pair."""
  compared = variants.compare(config.STUDY, rows)
  losses = {
    key: compared.losses.get(name, {}) for key, name in config.NAMES.items()
  }
  difference = functools.partial(_difference, spread=compared.spread)
  # (series of a start of queries, heads) of two arms; series 1 is one head at
  # the temperature of so many.
  arms = {f"H = {heads} against 1": ((0, heads), (0, 1))
          for heads in config.HEADS[1:]}  # fmt: skip
  for heads in config.COOL_HEADS:
    cool = f"one head at the temperature of {heads}"
    arms[f"{cool} against 1"] = (1, heads), (0, 1)
    arms[f"H = {heads} against {cool}"] = (0, heads), (1, heads)
  starts = (config.ZERO, config.COOL), (config.RANDOM, config.COOL_RANDOM)
  by_start = [
    [
      label,
      *(
        difference(losses[series[i], ours], losses[series[j], other])
        for series in starts
      ),
    ]
    for label, ((i, ours), (j, other)) in arms.items()
  ]
  random, zero = (
    {heads: losses[series, heads] for heads in config.HEADS}
    for series in (config.RANDOM, config.ZERO)
  )
  by_heads = [
    [f"H = {heads}", difference(random[heads], zero[heads])]
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
  arm: Mapping[int, float], other: Mapping[int, float], spread: Any
) -> str:
  """`arm` minus `other`; empty without pairs."""
  apart = pairs.difference(arm, other, spread)
  return page.difference(apart) if apart.by_seed else ""


def _mean(losses: Iterable[Mapping[int, float]]) -> dict[int, float]:
  """Over networks, for each seed that all of them have."""
  return pd.DataFrame(list(losses)).mean(skipna=False).dropna().to_dict()


PUBLISHED = variants.published(
  __file__, config.STUDY, [readme.Part(contrasts, "contrasts")]
)
