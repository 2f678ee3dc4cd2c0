# SPDX-License-Identifier: Apache-2.0
"""The command of an experiment that is a sweep.

  run      prepare the folder and launch what is not done (the default)
  status   a table: progress, losses, time left, failures
  collect  rows.csv, a row per finished run
  report   the experiment's report, from what is finished

An experiment passes its config file and a function that renders its report, a
page. During a launch it is updated again and again, and lines say how far the
runs are. `python -m attnres_jax.sweep` takes any config, and fields to vary.

Runs that fail or have a damaged file do not stop the others; each gets a line
on stderr, and the exit status is 1.

This module has the flags, `actions` what they do: a wrong flag is told before
JAX, Orbax and figures are imported.
"""

import argparse
from collections.abc import Callable, Sequence
import dataclasses
import importlib.util
from typing import Any

from etils import epath

from attnres_jax import config as config_lib
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
    config: the config file, with the argument it takes by default; None for any
      config, whose fields --sweep and --seeds vary.
    workdir: the folder of the sweep by default; None to ask for one.
    render: (folder, `monitor.Progress` of its runs) -> the report as HTML.
    launcher: by default.
    refresh_seconds: between two reports of a launch.
  """

  program: str
  description: str
  config: str | None
  workdir: str | None
  render: Callable[[epath.Path, Sequence[Any]], str]
  launcher: str = "local"
  refresh_seconds: float = 60.0


def main(experiment: Experiment, argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  options = make_parser(experiment).parse_args(argv)
  return command_line.run(_act, experiment, options)


def _act(experiment: Experiment, options: argparse.Namespace) -> int:
  if options.workdir is None:
    raise config_lib.ConfigError("--workdir: missing, expected a folder")
  # A dry run for a bucket need not reach it.
  if not (options.dry_run and files.is_remote(options.workdir)):
    reads = options.action == "status" or options.dry_run
    files.check_folder("--workdir", options.workdir, writable=not reads)
  fields.accept("--max_parallel", options.max_parallel, fields.Size)
  if options.action == "run":  # A wrong field is told before JAX is imported.
    options.runs = load_runs(options)  # Each of them is checked, once.
    if not options.dry_run:
      _check_installed()
  from attnres_jax.sweep import actions

  return actions.act(experiment, options)


def load_runs(options: argparse.Namespace) -> list[grid.Run]:
  """The runs of the config file, or of --sweep and --seeds.

  Raises:
    ConfigError: a field, a value or a file cannot be used.
  """
  config = command_line.needed(options.config)
  sweep = None
  if options.sweep or options.seeds:
    axes: dict[str, list[Any]] = {}
    for text in options.sweep:
      name, equals, values = text.partition("=")
      if not equals or name in axes:
        config_lib.fail_argument("--sweep", text, "NAME=VALUE,VALUE, NAME once")
      if options.seeds and name in ("seed", "data.seed"):
        config_lib.fail_argument("--sweep", text, "no seeds beside --seeds")
      axes[name] = config_lib.parse_values(name, values)
    sweep = grid.of_axes(axes, range(options.seeds or 0))
  return grid.load(config.spec, config.fields, sweep)


def source(options: argparse.Namespace) -> str:
  """What the runs come from, as flags."""
  flags = [f"--sweep {text}" for text in options.sweep]
  if options.seeds:
    flags.append(f"--seeds={options.seeds}")
  return " ".join([str(options.config), *flags])


def _check_installed() -> None:
  """Refuses a launch that could not draw its report in the end."""
  for name in ("jinja2", "matplotlib", "pandas"):
    if importlib.util.find_spec(name) is None:
      raise ImportError(
        f'the report needs {name}: pip install "attnres-jax[plots]"'
      )


def make_parser(experiment: Experiment) -> command_line.Parser:
  """The flags of an experiment's command."""
  parser = command_line.Parser(experiment.program, experiment.description)
  add, run = parser.add_argument, ("action", ("run",))
  add(
    "action", nargs="?", default="run", choices=ACTIONS,
    help="run what is not done; show a table of all runs; write rows.csv, a row"
    " per finished run; or draw the report of these",
  )  # fmt: skip
  parser.add_config(experiment.config)
  if experiment.config is None:
    add(
      "--sweep", action="append", default=[], metavar="NAME=VALUE,VALUE",
      help="trains with each value of a field, or argument of the config file;"
      " several flags give every combination (default: the file's own sweep)",
    )  # fmt: skip
    add(
      "--seeds", type=fields.Size, metavar="N",
      help="how many of each, with seed and data.seed 0 to N - 1",
    )  # fmt: skip
  else:
    parser.set_defaults(sweep=[], seeds=None)
  add(
    "--workdir",
    default=experiment.workdir,
    help="of the sweep; or gs://, s3://",
  )
  for name, default, actions, words in (
    ("only", "", "run status collect", "regular expression over names of runs"),
    ("launcher", experiment.launcher, "run", ", ".join(sweep.LAUNCHERS)),
    ("plans", plans.FILE, "run", "for optim.accumulate_steps=0"),
    ("max_parallel", 1, "run", "runs at a time"),
    ("watch", 0.0, "status", "seconds between tables"),
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
    "--dry_run", action="store_true", when=run, help="say what would be started"
  )
  return parser
