# SPDX-License-Identifier: Apache-2.0
"""The command of an experiment that is a sweep.

  run      prepare the folder and launch what is not done (the default)
  status   a table: progress, losses, time left, failures
  collect  rows.csv, a row per finished run
  report   the experiment's report, from what is finished

An experiment passes its config file and a function that renders its report, a
page. During a launch it is updated again and again, and lines say how far the
runs are.

Runs that fail or have a damaged file do not stop the others; each gets a line
on stderr, and the exit status is 1.

This module has the flags, `actions` what they do: a wrong flag is told before
JAX, Orbax and figures are imported.
"""

import argparse
from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from etils import epath

from attnres_jax import sweep
from attnres_jax.common import command_line
from attnres_jax.common import files
from attnres_jax.common import plans
from attnres_jax.config import fields
from attnres_jax.scaling import grid

ACTIONS = ("run", "status", "collect", "report")
ROWS, REPORT = "rows.csv", "report.html"


@dataclasses.dataclass(frozen=True)
class Experiment:
  """The parts that differ between experiments.

  Attributes:
    program: how it is started, for `--help`.
    description: one line.
    config: the config file, with the argument it takes by default.
    workdir: the folder of the sweep by default.
    render: (folder, `monitor.Progress` of its runs) -> the report as HTML.
    launcher: by default.
    refresh_seconds: between two reports of a launch.
  """

  program: str
  description: str
  config: str
  workdir: str
  render: Callable[[epath.Path, Sequence[Any]], str]
  launcher: str = "local"
  refresh_seconds: float = 60.0


def main(experiment: Experiment, argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  options = make_parser(experiment).parse_args(argv)
  return command_line.run(_act, experiment, options)


def _act(experiment: Experiment, options: argparse.Namespace) -> int:
  # A dry run for a bucket need not reach it.
  if not (options.dry_run and files.is_remote(options.workdir)):
    reads = options.action == "status" or options.dry_run
    files.check_folder("--workdir", options.workdir, writable=not reads)
  fields.accept("--max_parallel", options.max_parallel, fields.Size)
  if options.action == "run":  # A wrong field is told before JAX is imported.
    grid.load(options.config.spec, options.config.fields)
  from attnres_jax.sweep import actions

  return actions.act(experiment, options)


def make_parser(experiment: Experiment) -> command_line.Parser:
  """The flags of an experiment's command."""
  parser = command_line.Parser(experiment.program, experiment.description)
  add, run = parser.add_argument, ("action", ("run",))
  add("action", nargs="?", default="run", choices=ACTIONS)
  parser.add_config(experiment.config)
  add(
    "--workdir",
    default=experiment.workdir,
    help="of the sweep; or gs://, s3://",
  )
  for name, default, actions, words in (
    ("only", "", "run status collect", "regular expression over names of runs"),
    ("launcher", experiment.launcher, "run", ", ".join(sweep.LAUNCHERS)),
    ("preflight", None, "run", "compile for this slice first, such as v5p-32"),
    ("plans", plans.FILE, "run", "for optim.accumulate_steps=0"),
    ("max_parallel", 1, "run", "runs at a time"),
    ("watch", 0.0, "status", "seconds between tables"),
    ("run", None, "status", "name of a run whose last error to show"),
    ("out", None, "collect", "file (default: rows.csv of the sweep)"),
  ):
    kind = {"max_parallel": fields.Few, "watch": fields.NotNegative}.get(
      name, str
    )
    when = ("action", tuple(actions.split()))
    add(f"--{name}", type=kind, default=default, when=when, help=words)
  add(
    "--set", action="append", default=[], when=run, metavar="NAME=VALUE",
    help="for a launcher",
  )  # fmt: skip
  add(
    "--max_chip_hours", type=fields.NotNegative, when=run, metavar="N",
    help="refuse a sweep that its plans say costs more, and say what fits",
  )  # fmt: skip
  add(
    "--dry_run", action="store_true", when=run, help="say what would be started"
  )
  return parser
