# SPDX-License-Identifier: Apache-2.0
"""The loss over the number of softmaxes per read, by the start of queries."""

from collections.abc import Mapping, Sequence
import statistics
from typing import Any

from matplotlib import figure as figure_lib

from attnres_jax.analysis import figures
from attnres_jax.scaling import pairs
from experiments.depth_heads import config
from experiments.pages import page
from experiments.pages import variants
from experiments.variants import Study

# Of a series: what draws it, and a shift that keeps intervals apart.
_LOOKS = {
  config.ZERO: ("tab:blue", "o", "-", 0.97),
  config.RANDOM: ("tab:orange", "s", "-", 1.03),
  config.COOL: ("tab:blue", "^", "--", 0.91),
  config.COOL_RANDOM: ("tab:orange", "v", "--", 1.09),
}


def figure(
  study: Study, rows: Sequence[Mapping[str, Any]]
) -> figure_lib.Figure:
  """Differences from PreNorm with intervals, a line per series."""
  apart = variants.differences(study, rows)
  shape = figure_lib.Figure(figsize=(7.4, 4.0), layout="constrained")
  axes = shape.subplots()
  for series, (colour, marker, line, shift) in _LOOKS.items():
    found = {
      heads: apart[name]
      for (own, heads), name in config.NAMES.items()
      if own == series and name in apart
    }
    axes.errorbar(
      [heads * shift for heads in found],
      [one.mean for one in found.values()],
      [one.margin or 0.0 for one in found.values()],
      color=colour, marker=marker, linestyle=line, capsize=3,
      label=config.LABELS[series],
    )  # fmt: skip
  axes.axhline(0.0, color="grey", linewidth=0.8)
  axes.set_xscale("log", base=2)
  axes.set_xticks(config.HEADS, [str(heads) for heads in config.HEADS])
  axes.set_xlabel("H: softmaxes per read, or the temperature of one")
  axes.set_ylabel("difference from PreNorm,\nnats per token")
  figures.style(axes)
  handles, labels = axes.get_legend_handles_labels()
  shape.legend(
    handles, labels, loc="outside upper left", ncols=2, frameon=False
  )
  return shape


def contrasts(rows: Sequence[Mapping[str, Any]]) -> str:
  """Variants against each other instead of PreNorm, pair by pair."""
  every = variants.with_shared(config.STUDY, rows)
  spread = variants.spread_of(rows, config.STUDY)
  found = pairs.losses(variants.at_own_settings(every), "variant")
  losses = {
    key: found[name] for key, name in config.NAMES.items() if name in found
  }
  compared = {
    f"H = {heads} against 1": ((0, heads), (0, 1)) for heads in config.HEADS[1:]
  }
  for heads in config.COOL_HEADS:
    one = f"one head at the temperature of {heads}"
    compared[f"{one} against 1"] = (1, heads), (0, 1)
    compared[f"H = {heads} against {one}"] = (0, heads), (1, heads)
  # Of each start of queries: H heads, and one at the temperature of H.
  starts = (config.ZERO, config.COOL), (config.RANDOM, config.COOL_RANDOM)
  by_start = [
    [
      label,
      *(
        _difference(
          losses.get((series[i], own)), losses.get((series[j], other)), spread
        )
        for series in starts
      ),
    ]
    for label, ((i, own), (j, other)) in compared.items()
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
  tables = (
    page.Table(("difference of two arms", *labels), by_start),
    page.Table(("random queries minus zero", "difference"), by_heads),
  )
  return "\n\n".join(table.markdown() for table in tables)


def _difference(
  own: Mapping[int, float] | None,
  other: Mapping[int, float] | None,
  spread: pairs.Spread | None,
) -> str:
  """`own` minus `other`; empty without pairs."""
  found = pairs.difference(own or {}, other or {}, spread)
  return page.difference(found) if found.by_seed else ""


def _mean(losses: Any) -> dict[int, float]:
  """Over networks, for each seed that all of them have."""
  several = list(losses)
  seeds = sorted(set.intersection(*map(set, several)))
  return {
    seed: statistics.fmean(one[seed] for one in several) for seed in seeds
  }
