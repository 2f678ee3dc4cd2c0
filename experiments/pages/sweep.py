# SPDX-License-Identifier: Apache-2.0
"""Experiments that are sweeps: command, report and README.

The report is one self-contained page about finished and unfinished runs.
`report` is shared by all sweeps; an experiment may add its own answer.
"""

from collections.abc import Callable, Mapping, Sequence
import pathlib
import time
from typing import Any

from etils import epath

from attnres_jax.analysis import figures
from attnres_jax.sweep import cli
from attnres_jax.sweep import damage
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import monitor
from attnres_jax.sweep import state as state_lib
from experiments.pages import curves
from experiments.pages import losses
from experiments.pages import page
from experiments.pages import readme
from experiments.pages import svg

_BODY = pathlib.Path(__file__).with_name("sweep.html")
_REFRESH_SECONDS = 20
_MAX_ERROR = 400
_NO_CURVES = "No run has logged a step yet, or there are too many settings."

Row = Mapping[str, Any]
Render = Callable[[epath.Path, Sequence[monitor.Progress]], str]


def experiment(
  file: str,
  doc: str | None,
  *,
  config: str = "",
  workdir: str = "",
  render: Render | None = None,
  places: Sequence[readme.Place] = (),
  figures: Mapping[str, Callable[[Sequence[Row]], Any]] | None = None,
) -> tuple[cli.Experiment, readme.Published]:
  """The command of an experiment, and what it publishes.

  Args:
    file: run.py of the experiment, or another module with a command.
    doc: its docstring, which --help prints.
    config: file with the sweep; config.py of the experiment by default.
    workdir: of the sweep; runs/NAME by default.
    render: renders the report; by default it shows the losses.
    places: parts of documents to fill; by default the losses, in the README.
    figures: by the names of their files.
  """
  path = pathlib.Path(file).absolute()
  folder, name = path.parent, path.parent.name
  command = cli.Experiment(
    program=f"python -m experiments.{name}.{path.stem}",
    description=doc or "",
    config=config or f"experiments/{name}/config.py",
    workdir=workdir or f"runs/{name}",
    render=render or report,
  )
  places = places or [readme.Place(results)]
  return command, readme.Published(folder, places, figures or {})


def results(rows: Sequence[Row]) -> str:
  """For a README: the losses and their origin."""
  return f"{losses.table(rows).markdown()}\n\n{origin(rows)}"


def answer(rows: Sequence[Row]) -> page.Html:
  """The losses of any sweep, for experiments without their own figure."""
  table = losses.table(rows).html() if rows else "No run is done yet."
  return page.fill(
    "<h2>Losses</h2>\n{{ table }}\n<p class=note>Validation loss in nats per"
    " token after the last step, the mean over seeds; in small print the mean"
    " difference from PreNorm with its 90 % interval, then every seed. N counts"
    " parameters outside embedding and head.</p>",
    table=table,
  )


def report(
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
  running = sum(one.status == state_lib.RUNNING for one in progress)
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
      "facts": page.facts(_facts(folder, rows)),
    }
  over = all(one.status == state_lib.DONE for one in progress)
  return page.render(
    title, _BODY, parts, refresh_seconds=0 if over else _REFRESH_SECONDS
  )


def runs(progress: Sequence[monitor.Progress]) -> page.Table:
  """A line per run, with its error in small print."""
  rows = []
  for one, (name, status, *cells) in zip(progress, monitor.cells(progress)):
    error = [one.error[:_MAX_ERROR]] if one.error else []
    rows.append(
      [page.Cell("", small=[name]), page.Cell(status, small=error), *cells]
    )
  return page.Table(monitor.COLUMNS, rows)


def goodput(progress: Sequence[monitor.Progress]) -> page.Table:
  """How the time was spent, for every scheme and in total."""
  known = [one for one in progress if one.run is not None]
  groups: dict[str, list[monitor.Progress]] = {}
  for one in known:
    groups.setdefault(figures.name_of(one.residual), []).append(one)
  groups["**all**"] = known
  columns = []
  for own in groups.values():
    spent = sum((one.goodput for one in own), monitor.goodput_lib.Goodput())
    total = sum(one.seconds for one in own)
    seconds = spent.seconds | {"other": max(0.0, total - spent.total)}
    cells = {name: _share(value, total) for name, value in seconds.items()}
    columns.append(cells | {"**total**": monitor.duration(total)})
  rows = [
    [name.replace("_", " "), *(column[name] for column in columns)]
    for name in columns[0]
  ]
  return page.Table(["", *groups], rows)


def origin(rows: Sequence[Row]) -> str:
  """One sentence on the origin of committed rows."""
  seeds = sorted({int(row["seed"]) for row in rows})
  named = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
  hours = sum(float(row["seconds"]) for row in rows) / 3600
  return (
    f"{len(rows)} runs, {named}, {hours:.1f} hours in all; text"
    f" {_all(rows, 'data')}; {readme.origin(rows)}"
  )


def _facts(folder: epath.Path, rows: Sequence[Row]) -> dict[str, Any]:
  """Facts about the runs, not about the machine that draws the page."""
  try:
    source = folder_lib.source(folder)
  except (FileNotFoundError, damage.DamagedError) as error:
    source = str(error)
  columns = ("device", "hardware", "python", "jax", "commit", "data")
  return {
    "Sweep": source,
    **{name.capitalize(): _all(rows, name) for name in columns},
    "Date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
  }


def _all(rows: Sequence[Row], name: str) -> str:
  return ", ".join(sorted({str(row[name]) for row in rows}))


def _share(seconds: float, total: float) -> page.Cell:
  share = f"{seconds / total:.0%}" if total else ""
  return page.Cell(share, small=[f"{seconds:,.0f} s"])
