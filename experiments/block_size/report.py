# SPDX-License-Identifier: Apache-2.0
"""Fig. 6: the loss over the size of blocks, as differences from PreNorm."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import figure as figure_lib

from attnres_jax.analysis import figures
from experiments.block_size import config
from experiments.pages import variants

Rows = Sequence[Mapping[str, Any]]


def figure(rows: Rows, deep: Rows) -> figure_lib.Figure:
  """A panel per depth, with intervals; the paper's numbers as hollow marks."""
  shape = figure_lib.Figure(figsize=(8.4, 3.6), layout="constrained")
  panels = shape.subplots(1, 2, sharey=True)
  style = figures.style_of("block_attnres")
  for axes, study, own, title in (
    (panels[0], config.STUDY, rows, "16 sublayers"),
    (panels[1], config.DEEP, deep, "32 sublayers, as in the paper"),
  ):
    apart = variants.differences(study, own)
    sizes = [size for size, name in config.NAMES.items() if name in apart]
    found = [apart[config.NAMES[size]] for size in sizes]
    for size, one in zip(sizes, found):
      values = list(one.by_seed.values())
      axes.plot(
        [size] * len(values), values, ".", color=style["color"], alpha=0.5
      )
    axes.errorbar(
      sizes, [one.mean for one in found], [one.margin or 0.0 for one in found],
      capsize=4, label="ours: mean and 90 % interval, and every pair", **style,
    )  # fmt: skip
    known = [
      size
      for size, name in config.NAMES.items()
      if study.variants[name].published is not None
    ]
    axes.plot(
      known,
      [variants.paper_difference(study, config.NAMES[size]) for size in known],
      "D", markerfacecolor="none", color="grey",
      label="paper, 436M parameters",
    )  # fmt: skip
    axes.axhline(0.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(config.NAMES), [str(size) for size in config.NAMES])
    axes.set_xlabel("sublayers per block, S")
    axes.set_title(title)
    figures.style(axes)
  panels[0].set_ylabel("difference from PreNorm,\nnats per token")
  figures.legend(shape, panels[0])
  return shape
