# SPDX-License-Identifier: Apache-2.0
"""The command of an experiment that is a sweep."""

import pathlib

from attnres_jax.sweep import cli


def experiment(
  file: str,
  doc: str | None,
  *,
  config: str = "",
  workdir: str = "",
  launcher: str = "local",
  refresh_seconds: float = 60.0,
) -> cli.Experiment:
  """The command in run.py of an experiment, or in another module.

  Args:
    file: of the module.
    doc: its docstring, which --help prints.
    config: file with the sweep; config.py of the experiment by default.
    workdir: of the sweep; runs/NAME by default.
    launcher: by default.
    refresh_seconds: between two reports of a launch.
  """
  path = pathlib.Path(file).absolute()
  name = path.parent.name

  def render(folder, progress):
    from experiments.pages import readme  # Once there is something to draw.

    return readme.load(name).render(folder, progress)

  return cli.Experiment(
    program=f"python -m experiments.{name}.{path.stem}",
    description=doc or "",
    config=config or f"experiments/{name}/config.py",
    workdir=workdir or f"runs/{name}",
    render=render,
    launcher=launcher,
    refresh_seconds=refresh_seconds,
  )
