# SPDX-License-Identifier: Apache-2.0
"""The command of an experiment that is a sweep."""

import pathlib
from typing import Any

from attnres_jax.sweep import cli


def experiment(file: str, doc: str | None, **others: Any) -> cli.Experiment:
  """The command of a module in the folder of an experiment.

  Its docstring is what --help prints. Fields that are not given are config.py
  in the folder, runs/NAME, and the defaults of `cli.Experiment`.
  """
  path = pathlib.Path(file).absolute()
  name = path.parent.name

  def render(*sweep):
    from experiments.pages import readme  # There is something to draw.

    return readme.load(name).render(*sweep)

  fields: dict[str, Any] = {
    "program": f"python -m experiments.{name}.{path.stem}",
    "description": doc or "",
    "config": f"experiments/{name}/config.py",
    "workdir": f"runs/{name}",
    "render": render,
  }
  return cli.Experiment(**fields | others)
