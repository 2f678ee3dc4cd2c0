# SPDX-License-Identifier: Apache-2.0
"""Results of the runs of configs/arch_sweep.py: Fig. 7 and differences."""

from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from matplotlib import figure as figure_lib
import numpy as np

from attnres_jax.analysis import figures
from attnres_jax.scaling import plots
from attnres_jax.sweep import monitor
from attnres_jax.sweep.pages import losses as losses_lib
from attnres_jax.sweep.pages import page
from attnres_jax.sweep.pages import svg
from attnres_jax.sweep.pages import sweep_page
from experiments.pages import readme

BASELINE, OTHER = "prenorm", "full_attnres"

Row = Mapping[str, Any]


def render(folder: epath.Path, progress: Sequence[monitor.Progress]) -> str:
  """The page of the sweep."""
  title = "Loss over the shape of the network"
  return sweep_page.render(folder, progress, title, _answer)


def results(rows: Sequence[Row]) -> str:
  """Markdown for the README."""
  return readme.text(table(rows), gains(rows), readme.origin(rows, runs=True))


def figure(rows: Sequence[Row]) -> figure_lib.Figure:
  """Fig. 7, a heatmap per scheme."""
  rhos, etas, losses = heatmaps(rows)
  return plots.figure_7(losses, widths_per_layer=rhos, heads_per_layer=etas)


def heatmaps(
  rows: Sequence[Row],
) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
  """Every rho, every eta, and losses of each scheme.

  Losses are [rhos, etas], means over seeds; NaN if no run is done.
  """
  rows = [row for row in rows if {"rho", "eta"} <= row.keys()]
  if not rows:
    return [], [], {}
  runs = losses_lib.frame(rows).astype({"rho": float, "eta": float})
  rhos, etas = (sorted(runs[name].unique()) for name in ("rho", "eta"))
  losses = {
    scheme: arm.pivot_table("loss", "rho", "eta").reindex(rhos, columns=etas)
    for scheme, arm in runs.groupby("residual", sort=False)
  }
  return rhos, etas, {name: cells.to_numpy() for name, cells in losses.items()}


def table(rows: Sequence[Row]) -> page.Table:
  """A line per shape, the best of each scheme in bold."""
  rhos, etas, losses = heatmaps(rows)
  apart = _differences(losses)
  lines = []
  for cell in np.ndindex(len(rhos), len(etas)):
    cells = [f"{rhos[cell[0]]:g}", f"{etas[cell[1]]:g}"]
    for grid in losses.values():
      text = f"{grid[cell]:.4f}" if np.isfinite(grid[cell]) else ""
      best = grid[cell] == np.nanmin(grid)
      cells.append(f"**{text}**" if best else text)
    is_finite = np.isfinite(apart[cell])
    lines.append([*cells, page.signed(apart[cell]) if is_finite else ""])
  names = [figures.name_of(scheme) for scheme in losses]
  return page.Table(["rho", "eta", *names, "difference"], lines)


def gains(rows: Sequence[Row]) -> str:
  """The extremes of the differences, in words."""
  apart = _differences(heatmaps(rows)[2])
  finite = apart[np.isfinite(apart)]
  if not finite.size:
    return "No shape has been trained with both schemes yet."
  return (
    f"{figures.name_of(OTHER)} is lower in {int(np.sum(finite < 0))} of"
    f" {finite.size} shapes; differences are {page.signed(finite.min())} to"
    f" {page.signed(finite.max())} nats."
  )


def _differences(losses: Mapping[str, np.ndarray]) -> np.ndarray:
  """Differences from the baseline; NaN if one of the two is missing."""
  if {BASELINE, OTHER} <= losses.keys():
    return losses[OTHER] - losses[BASELINE]
  return np.full(next(iter(losses.values()), np.zeros((0, 0))).shape, np.nan)


def _answer(rows: Sequence[Row]) -> page.Html:
  if not any({"rho", "eta"} <= row.keys() for row in rows):
    return page.Html("Heatmaps appear with the first run that is done.")
  return page.fill(
    "<figure>{{ heatmaps }}</figure>\n"
    '<p class="note">Validation loss in nats per token. Rows: width over'
    " transformer blocks (rho); columns: heads over transformer blocks (eta)."
    " All networks have the same parameters and see the same tokens. Filled"
    " stars are the best cells here. Hollow stars are the paper's best cells"
    " (Fig. 7), where the grid has them.</p>\n"
    "<h2>What depth attention gains</h2>\n<p>{{ gains }}</p>\n{{ table }}\n"
    '<p class="note">Differences of Full AttnRes from PreNorm, shape by shape.'
    " In the paper AttnRes is lower in all 25 cells, by 0.019 to 0.063. With"
    " one seed, a difference means no more than the spread between seeds that"
    " the scaling sweep measures.</p>",
    heatmaps=svg.to_svg(figure(rows), "heatmaps"),
    gains=gains(rows),
    table=table(rows).html(),
  )
