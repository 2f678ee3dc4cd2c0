# SPDX-License-Identifier: Apache-2.0
"""The command of an experiment that is a sweep.

  run      prepare the folder and launch what is not done (the default)
  status   a table: progress, losses, time left, failures
  collect  rows.csv, a row per finished run
  report   the experiment's report, from what is finished

An experiment passes its config file and a function that renders its report, a
page. During a launch it is updated every minute, and a line says how far the
runs are.

Runs that fail or have a damaged file do not stop the others; each gets a line
on stderr, and the exit status is 1.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import sys
import threading
import time

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.common import command_line
from attnres_jax.common import csv_rows
from attnres_jax.common import files
from attnres_jax.common import plans
from attnres_jax.common import text_table
from attnres_jax.config import fields
from attnres_jax.scaling import grid
from attnres_jax.sweep import budget
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import launchers
from attnres_jax.sweep import monitor
from attnres_jax.sweep import preflight
from attnres_jax.sweep import state as state_lib
from attnres_jax.train import signals

ACTIONS = ("run", "status", "collect", "report")
ROWS, REPORT = "rows.csv", "report.html"
_REFRESH_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Experiment:
  """The parts that differ between experiments.

  Attributes:
    program: how it is started, for `--help`.
    description: one line.
    config: the config file, with the argument it takes by default.
    workdir: the folder of the sweep by default.
    render: (folder, progress of its runs) -> the report as HTML.
  """

  program: str
  description: str
  config: str
  workdir: str
  render: Callable[[epath.Path, Sequence[monitor.Progress]], str]


def main(experiment: Experiment, argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  options = make_parser(experiment).parse_args(argv)
  signals.outlive_outputs()
  return command_line.run(_act, experiment, options)


def _act(experiment: Experiment, options: argparse.Namespace) -> int:
  # A dry run for a bucket need not reach it.
  if not (options.dry_run and files.is_remote(options.workdir)):
    reads = options.action == "status" or options.dry_run
    files.check_folder("--workdir", options.workdir, writable=not reads)
  fields.accept("--max_parallel", options.max_parallel, fields.Size)
  return _ACTIONS[options.action](experiment, options)


def _run(experiment: Experiment, options: argparse.Namespace) -> int:
  settings = _settings(options.set)
  told = launchers.Options(
    options.max_parallel, options.dry_run, settings, options.only
  )
  launcher = launchers.load(options.launcher, told)
  folder = epath.Path(options.workdir)
  source = options.config
  runs = grid.load(source.spec, source.fields)
  selected = grid.select(runs, options.only)
  _check_data(selected, offline=options.dry_run)
  found = budget.prices(selected, plans.rows(options.plans))
  given = settings.get("slice") or settings.get("accelerator")
  if options.max_chip_hours is not None:
    name = given or options.preflight
    budget.check(selected, found, options.max_chip_hours, name)
  if given and given not in ("cpu", "gpu"):
    # A plan is for one slice.
    several = settings.get("slices", "1") != "1"
    budget.check_planned(selected, [] if several else found, given)
  # As comments, since a dry run may print a manifest or a script.
  text = budget.to_text(selected, found)
  print("\n".join(f"# {line}" for line in text.splitlines()), flush=True)
  if options.preflight:
    if not preflight.check(selected, options.preflight, options.plans):
      return 1
  if not options.dry_run:
    if (folder / REPORT).exists() and not (folder / folder_lib.SWEEP).exists():
      files.fail_foreign("--workdir", folder, REPORT)
    runs = folder_lib.prepare(folder, runs, str(source))
    plans.copy(options.plans, folder)
  selected = grid.select(runs, options.only)
  if options.dry_run:
    return launcher.launch(selected, folder, told)
  launched = {run.name for run in selected}

  def report() -> list[monitor.Progress]:
    progress = monitor.of_folder(folder)
    ours = [one for one in progress if one.name in launched]
    print(_line(ours, options.max_parallel), flush=True)
    # Some experiments look into every network, which may take minutes.
    _write_report(experiment, folder, progress)
    return ours

  with _every_minute(report):
    result = launcher.launch(selected, folder, told)
  print("drawing the report", flush=True)
  progress = report()
  print(f"report: {folder / REPORT}")
  # No launcher starts these.
  over = (state_lib.DAMAGED, state_lib.DIVERGED)
  return result or _outcome([one for one in progress if one.status in over])


def _check_data(runs: Sequence[grid.Run], offline: bool) -> None:
  """Refuses runs whose text is too short or not of their vocabulary.

  Raises:
    ConfigError: naming the run, the field and what would be accepted.
  """
  checked = set()
  for run in runs:
    config = folder_lib.run_config(run)
    # Seeds and schemes share a text, which may take long to count.
    text = dataclasses.replace(config.data, seed=0)
    key = text, config.train.steps, config.model.vocab_size
    if key in checked:
      continue
    checked.add(key)
    try:
      data.check(config, offline=offline)
    except config_lib.ConfigError as error:
      raise config_lib.ConfigError(f"{run.name}: {error}") from None


def _status(experiment: Experiment, options: argparse.Namespace) -> int:
  while True:
    if options.run:
      print(monitor.details(options.workdir, options.run))
      return 0
    progress = _known(options, whole=False)
    text = monitor.table(progress)
    if not options.watch > 0:
      print(text)
      return int(any(map(_is_bad, progress)))
    # Home and clear, so that the table stays in place.
    print("\x1b[H\x1b[2J", end="", file=text_table.unfiltered(sys.stdout))
    print(text, flush=True)
    time.sleep(min(options.watch, 3600.0))


def _collect(experiment: Experiment, options: argparse.Namespace) -> int:
  progress = _known(options)
  path = epath.Path(options.out or epath.Path(options.workdir) / ROWS)
  found = monitor.rows(progress)
  files.check_output("--out", path, ("run", "validation_loss"))
  if not files.is_remote(path):
    path.parent.mkdir(parents=True, exist_ok=True)
  csv_rows.write(path, found)
  print(f"{len(found)} of {len(progress)} runs: {path}")
  return _outcome(progress)


def _report(experiment: Experiment, options: argparse.Namespace) -> int:
  progress, folder = _known(options), epath.Path(options.workdir)
  _write_report(experiment, folder, progress)
  print(folder / REPORT)
  return _outcome(progress)


def _write_report(
  experiment: Experiment,
  folder: epath.Path,
  progress: Sequence[monitor.Progress],
) -> None:
  files.write(folder / REPORT, experiment.render(folder, progress))


def _line(progress: Sequence[monitor.Progress], parallel: int) -> str:
  """How far the runs of a launch are."""
  text = monitor.summary(progress, parallel)
  running = [one for one in progress if one.status == state_lib.RUNNING]
  steps = ", ".join(f"{one.name} {one.step}/{one.steps}" for one in running)
  return f"{text}: {steps}" if steps else text


def _is_bad(progress: monitor.Progress) -> bool:
  return progress.status in state_lib.BAD


def _outcome(progress: Sequence[monitor.Progress]) -> int:
  """The exit status; prints the errors of runs."""
  bad = [one for one in progress if _is_bad(one)]
  for line in monitor.errors(bad):
    print(f"error: {line}", file=sys.stderr)
  return 1 if bad else 0


_ACTIONS = {
  "run": _run,
  "status": _status,
  "collect": _collect,
  "report": _report,
}


def _known(
  options: argparse.Namespace, whole: bool = True
) -> list[monitor.Progress]:
  """Progress of the selected runs of a folder, which must contain a sweep."""
  progress = monitor.of_folder(options.workdir, whole)
  if not progress:
    raise config_lib.ConfigError(
      f"--workdir: got {options.workdir!r}, expected the folder of a sweep"
    )
  if options.given & {"config", "config_fields"}:
    folder_lib.check_source(options.workdir, options.config)
  return grid.select(progress, options.only)


def _settings(given: Sequence[str]) -> dict[str, str]:
  settings = {}
  for one in given:
    name, equals, value = one.partition("=")
    if not equals:
      raise config_lib.ConfigError(f"--set: got {one!r}, expected name=value")
    settings[name] = value
  return settings


@contextlib.contextmanager
def _every_minute(action: Callable[[], object]) -> Iterator[None]:
  """Calls something once a minute while open, on a thread."""
  over = threading.Event()

  def loop():
    while not over.wait(_REFRESH_SECONDS):
      try:
        action()
      except Exception as error:
        # The runs do not depend on it, and it is called again at the end.
        print(f"report: {type(error).__name__}: {error}", file=sys.stderr)

  thread = threading.Thread(target=loop, daemon=True)
  thread.start()
  try:
    yield
  finally:
    over.set()
    thread.join()


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
    ("launcher", "local", "run", ", ".join(launchers.LAUNCHERS)),
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
