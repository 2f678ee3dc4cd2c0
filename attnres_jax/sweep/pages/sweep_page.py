# SPDX-License-Identifier: Apache-2.0
"""The report of a sweep, one self-contained page of finished and open runs."""

from collections.abc import Callable, Mapping, Sequence
import pathlib
import time
from typing import Any

from etils import epath

from attnres_jax.analysis import figures
from attnres_jax.sweep import damage
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import monitor
from attnres_jax.sweep import state as state_lib
from attnres_jax.sweep.pages import curves
from attnres_jax.sweep.pages import losses
from attnres_jax.sweep.pages import page
from attnres_jax.sweep.pages import svg

_BODY = pathlib.Path(__file__).with_name("sweep.html")
_REFRESH_SECONDS = 20
_MAX_ERROR = 400
_NO_CURVES = "No run has logged a step yet, or there are too many settings."

Row = Mapping[str, Any]
Render = Callable[[epath.Path, Sequence[monitor.Progress]], str]


def answer(rows: Sequence[Row]) -> page.Html:
  """The losses of any sweep, for experiments without their own figure.

  If a setting has several learning rates, the tables also mark the best ones.
  """
  table = losses.table(rows).html() if rows else "No run is done yet."
  return page.fill(
    "<h2>Losses</h2>\n{{ table }}\n<p class=note>Validation loss in nats per"
    " token after the last step, the mean over seeds; in small print the mean"
    " difference from PreNorm with its 90 % interval, then every seed. N counts"
    " parameters outside embedding and head.</p>",
    table=table,
  ) + _rates(rows)


def render(
  folder: epath.Path,
  progress: Sequence[monitor.Progress],
  title: str = "Losses of a sweep",
  answer: Callable[[Sequence[Row]], str] = answer,
) -> str:
  """The page, with the results so far; it reloads itself until all are done.

  `answer` turns the rows of finished runs into HTML. Figures have to be created
  within this call, which is within `svg.style()`.
  """
  rows = monitor.rows(progress)
  running = sum(run.status == state_lib.RUNNING for run in progress)
  with svg.style():
    figure = curves.draw(curves.of_sweep(progress))
    parts = {
      "title": title,
      "summary": monitor.summary(progress, running) + ".",
      "answer": answer(rows),
      "curves": svg.to_svg(figure, "curves") if figure else _NO_CURVES,
      "goodput": goodput(progress).html(),
      "lost_steps": f"{sum(x.goodput.lost_steps for x in progress):,}",
      "runs": runs(progress).html(),
      "facts": _facts(folder, rows),
    }
  over = all(run.status == state_lib.DONE for run in progress)
  return page.render(
    title, _BODY, parts, refresh_seconds=0 if over else _REFRESH_SECONDS
  )


def runs(progress: Sequence[monitor.Progress]) -> page.Table:
  """A line per run, with its error in small print."""
  rows = []
  for run, (name, status, *cells) in zip(progress, monitor.cells(progress)):
    error = [run.error[:_MAX_ERROR]] if run.error else []
    rows.append(
      [page.Cell("", small=[name]), page.Cell(status, small=error), *cells]
    )
  return page.Table(monitor.COLUMNS, rows)


def goodput(progress: Sequence[monitor.Progress]) -> page.Table:
  """How the time was spent, for every scheme and in total."""
  readable = [run for run in progress if run.run is not None]
  groups: dict[str, list[monitor.Progress]] = {}
  for run in readable:
    groups.setdefault(figures.name_of(run.residual), []).append(run)
  rows: dict[str, list[Any]] = {}
  for group in [*groups.values(), readable]:
    spent = sum((run.goodput for run in group), monitor.goodput_lib.Goodput())
    total = sum(run.seconds for run in group)
    seconds = spent.seconds | {"other": max(0.0, total - spent.total)}
    cells = {name: _share(value, total) for name, value in seconds.items()}
    for name, cell in (cells | {"**total**": monitor.duration(total)}).items():
      rows.setdefault(name, [name.replace("_", " ")]).append(cell)
  return page.Table(["", *groups, "**all**"], [*rows.values()])


def _facts(folder: epath.Path, rows: Sequence[Row]) -> dict[str, Any]:
  """Facts about the runs, not about the machine that draws the page."""
  try:
    source = folder_lib.source(folder)
  except (FileNotFoundError, damage.DamagedError) as error:
    source = str(error)
  columns = ("device", "hardware", "python", "jax", "commit", "data")
  return {
    "Sweep": source,
    **{
      name.capitalize(): ", ".join(sorted({str(row[name]) for row in rows}))
      for name in columns
    },
    "Date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
  }


def _rates(rows: Sequence[Row]) -> page.Html:
  """Losses by learning rate, and of each scheme at its best one."""
  runs = losses.frame(rows, ("peak_lr", "optim.peak_lr"))
  if not rows or (runs.groupby("setting")["peak_lr"].nunique() == 1).all():
    return page.Html("")
  return page.fill(
    "<h2>Learning rates</h2>\n{{ every }}\n{{ best }}\n<p class=note>Losses are"
    " means over seeds, with the best rate of each scheme in bold; the second"
    " table compares schemes at these. A best rate at an end of what was tried"
    " says that others beyond it may be better.</p>",
    every=losses.best_marked(rows, "peak_lr").html(),
    best=losses.table(rows, at="peak_lr").html(),
  )


def _share(seconds: float, total: float) -> page.Cell:
  share = f"{seconds / total:.0%}" if total else ""
  return page.Cell(share, small=[f"{seconds:,.0f} s"])
