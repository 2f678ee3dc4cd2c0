# SPDX-License-Identifier: Apache-2.0
"""The loss over the number of softmaxes per read, by the start of queries."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import figure as figure_lib

from attnres_jax import figures
from experiments.depth_heads import config
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
