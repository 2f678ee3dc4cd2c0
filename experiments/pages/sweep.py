# SPDX-License-Identifier: Apache-2.0
"""Experiments that are sweeps: their command, and what their READMEs show.

The report is `attnres_jax.sweep.pages.sweep_page`, with which an experiment may
show an answer of its own.
"""

from collections.abc import Callable, Mapping, Sequence
import pathlib
from typing import Any

from attnres_jax.sweep import cli
from attnres_jax.sweep.pages import losses
from attnres_jax.sweep.pages import sweep_page
from experiments.pages import readme

Row = Mapping[str, Any]


def experiment(
  file: str,
  doc: str | None,
  *,
  config: str = "",
  workdir: str = "",
  render: sweep_page.Render | None = None,
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
    render=render or sweep_page.render,
  )
  places = places or [readme.Place(results)]
  return command, readme.Published(folder, places, figures or {})


def results(rows: Sequence[Row]) -> str:
  """For a README: the losses and their origin."""
  return readme.text(losses.table(rows), readme.origin(rows, runs=True))
