# SPDX-License-Identifier: Apache-2.0
"""Results of the runs of configs/arch_sweep.py: Fig. 7 and differences."""

from collections.abc import Mapping, Sequence
import functools
import pathlib
from typing import Any

from matplotlib import figure as figure_lib
import pandas as pd

from attnres_jax.analysis import figures
from attnres_jax.scaling import plots
from attnres_jax.sweep.pages import losses as losses_lib
from attnres_jax.sweep.pages import page
from attnres_jax.sweep.pages import svg
from attnres_jax.sweep.pages import sweep_page
from experiments.pages import readme

_ANSWER = pathlib.Path(__file__).with_name("answer.html")
BASELINE, OTHER = "prenorm", "full_attnres"

Row = Mapping[str, Any]


def results(rows: Sequence[Row]) -> str:
  """Markdown for the README."""
  return readme.text(table(rows), gains(rows), readme.origin(rows, runs=True))


def figure(rows: Sequence[Row]) -> figure_lib.Figure:
  """Fig. 7, a heatmap per scheme."""
  losses = means(rows)
  rhos, etas = losses.index.levels
  return plots.figure_7(
    {scheme: losses[scheme].unstack().to_numpy() for scheme in losses},
    widths_per_layer=rhos.tolist(), heads_per_layer=etas.tolist(),
  )  # fmt: skip


def means(rows: Sequence[Row]) -> losses_lib.Frame:
  """Losses of every rho and eta, a column per scheme: means over seeds.

  NaN if no run is done.
  """
  rows = [row for row in rows if {"rho", "eta"} <= row.keys()]
  if not rows:
    return pd.DataFrame()
  runs = losses_lib.frame(rows).astype({"rho": float, "eta": float})
  losses = runs.pivot_table("loss", ["rho", "eta"], "residual", dropna=False)
  return losses[runs["residual"].unique()]


def table(rows: Sequence[Row]) -> page.Table:
  """A line per shape, the best of each scheme in bold."""
  losses = means(rows)
  columns = [losses_lib.bold(losses[s], losses[s].idxmin()) for s in losses]
  apart = _differences(losses).map(page.signed, na_action="ignore").fillna("")
  lines = [
    [f"{rho:g}", f"{eta:g}", *cells]
    for (rho, eta), *cells in zip(losses.index, *columns, apart)
  ]
  names = map(figures.name_of, losses)
  return page.Table(["rho", "eta", *names, "difference"], lines)


def gains(rows: Sequence[Row]) -> str:
  """The extremes of the differences, in words."""
  apart = _differences(means(rows)).dropna()
  if apart.empty:
    return "No shape has been trained with both schemes yet."
  return (
    f"{figures.name_of(OTHER)} is lower in {(apart < 0).sum()} of"
    f" {len(apart)} shapes; differences are {page.signed(apart.min())} to"
    f" {page.signed(apart.max())} nats."
  )


def _differences(losses: losses_lib.Frame) -> Any:
  """Differences from the baseline; NaN if one of the two is missing."""
  both = losses.reindex(columns=[OTHER, BASELINE])
  return both[OTHER] - both[BASELINE]


def _answer(rows: Sequence[Row]) -> page.Html:
  if not any({"rho", "eta"} <= row.keys() for row in rows):
    return page.Html("Heatmaps appear with the first run that is done.")
  return page.fill(
    _ANSWER.read_text(encoding="utf-8"),
    heatmaps=svg.to_svg(figure(rows), "heatmaps"),
    gains=gains(rows),
    table=table(rows).html(),
  )


PUBLISHED = readme.Published(
  __file__,
  [readme.Part(results), readme.Part(figure, document="heatmaps.svg")],
  functools.partial(
    sweep_page.render,
    title="Loss over the shape of the network",
    answer=_answer,
  ),
)
