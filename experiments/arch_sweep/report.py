# SPDX-License-Identifier: Apache-2.0
"""Fig. 7 from a sweep, finished or under way: one self-contained page."""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

from etils import epath
import numpy as np

from attnres_jax.scaling import plots
from attnres_jax.sweep import monitor
from experiments.pages import page
from experiments.pages import runs as runs_lib
from experiments.pages import svg

_BODY = pathlib.Path(__file__).with_name("report_page.html")
BASELINE, OTHER = "prenorm", "full_attnres"

Row = Mapping[str, Any]


def render(folder: epath.Path, progress: Sequence[monitor.Progress]) -> str:
  """The page, as far as runs are done; it reloads itself until all are."""
  del folder
  rhos, etas = axes([one.run.overrides for one in progress if one.run])
  losses = tables(monitor.rows(progress), rhos, etas)
  heatmaps = "Heatmaps appear with the first run that is done."
  if losses:
    with svg.style():
      figure = plots.figure_7(
        losses, widths_per_layer=rhos, heads_per_layer=etas
      )
      heatmaps = svg.to_svg(figure, "heatmaps")
  parts = {
    "summary": runs_lib.summary(progress),
    "heatmaps": heatmaps,
    "gains": gains(losses, rhos, etas),
    "runs": runs_lib.table(progress),
  }
  return page.render(
    "Loss over shape", _BODY, parts, refresh_seconds=runs_lib.refresh(progress)
  )


def axes(shapes: Sequence[Row]) -> tuple[list[float], list[float]]:
  """Every rho and every eta among rows, or among overrides of runs."""
  shapes = [one for one in shapes if {"rho", "eta"} <= one.keys()]
  rhos = sorted({float(one["rho"]) for one in shapes})
  etas = sorted({float(one["eta"]) for one in shapes})
  return rhos, etas


def tables(
  rows: Sequence[Row], rhos: Sequence[float], etas: Sequence[float]
) -> dict[str, np.ndarray]:
  """Losses of each scheme, [rhos, etas]; NaN where no run is done."""
  found: dict[str, np.ndarray] = {}
  for row in rows:
    if not {"rho", "eta"} <= row.keys():
      continue  # Of no shape that was named.
    table = found.setdefault(
      row["residual"], np.full((len(rhos), len(etas)), np.nan)
    )
    cell = rhos.index(float(row["rho"])), etas.index(float(row["eta"]))
    table[cell] = float(row["validation_loss"])
  return found


def gains(
  losses: Mapping[str, np.ndarray],
  rhos: Sequence[float],
  etas: Sequence[float],
) -> str:
  """A table of differences to the baseline, and their extremes in words."""
  if not {BASELINE, OTHER} <= losses.keys():
    return "<p>None yet.</p>"
  apart = losses[OTHER] - losses[BASELINE]
  header = ["&rho; \\ &eta;"] + [f"{eta:g}" for eta in etas]
  table = [
    [f"{rho:g}"] + [page.signed(x) if np.isfinite(x) else "" for x in row]
    for rho, row in zip(rhos, apart)
  ]
  known = apart[np.isfinite(apart)]
  if not known.size:
    return "<p>None yet.</p>"
  return (
    f"<p>Lower in {int((known < 0).sum())} of {known.size} cells, between"
    f" {page.signed(known.min())} and {page.signed(known.max())}.</p>\n"
    + page.table(header, table)
  )
