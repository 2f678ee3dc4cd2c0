# SPDX-License-Identifier: Apache-2.0
"""What the command of a sweep does; `cli` has its flags."""

import argparse
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import os
import sys
import threading
import time

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.common import csv_rows
from attnres_jax.common import files
from attnres_jax.common import plans
from attnres_jax.common import text_table
from attnres_jax.scaling import grid
from attnres_jax.sweep import budget
from attnres_jax.sweep import cli
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import launchers
from attnres_jax.sweep import monitor
from attnres_jax.sweep import state as state_lib
from attnres_jax.train import signals


def act(experiment: cli.Experiment, options: argparse.Namespace) -> int:
  """Acts; returns the exit status."""
  signals.outlive_outputs()
  return _ACTIONS[options.action](experiment, options)


def _run(experiment: cli.Experiment, options: argparse.Namespace) -> int:
  settings = _settings(options.set)
  launch_options = launchers.Options(
    options.max_parallel, options.dry_run, settings, options.only
  )
  launcher = launchers.load(options.launcher, launch_options)
  start = functools.partial(launchers.launch, options.launcher)
  folder = epath.Path(options.workdir)
  runs: list[grid.Run] = options.runs
  selected = grid.select(runs, options.only)
  _check_data(selected, offline=options.dry_run)
  prices = budget.prices(selected, plans.rows(options.plans))
  place = budget.place_of(launchers.read(launcher, launch_options))
  if place:
    budget.check_planned(selected, prices, place)
  # As comments, since a dry run may print a manifest or a script.
  text = budget.to_text(selected, prices)
  print("\n".join(f"# {line}" for line in text.splitlines()), flush=True)
  if not options.dry_run:
    # What the launcher refuses is told before anything is written.
    dry_options = dataclasses.replace(launch_options, dry_run=True)
    with open(os.devnull, "w") as out, contextlib.redirect_stdout(out):
      start(selected, folder, dry_options)
    page = folder / cli.REPORT
    if page.exists() and not (folder / folder_lib.SWEEP).exists():
      files.fail_foreign("--workdir", folder, cli.REPORT)
    runs = folder_lib.prepare(folder, runs, cli.source(options))
    plans.copy(options.plans, folder)
  selected = grid.select(runs, options.only)
  if options.dry_run:
    return start(selected, folder, launch_options)
  launched = {run.name for run in selected}

  def report() -> list[monitor.Progress]:
    progress = monitor.of_folder(folder)
    ours = [run for run in progress if run.name in launched]
    if options.launcher != "together":  # It prints lines itself.
      print(_line(ours, options.max_parallel), flush=True)
    # Some experiments look into every network, which may take minutes.
    _write_report(experiment, folder, progress)
    return ours

  print(f"{folder / cli.REPORT} follows the runs", flush=True)
  with _regularly(report, experiment.refresh_seconds):
    result = start(selected, folder, launch_options)
  print("drawing the report", flush=True)
  progress = report()
  print(f"report: {folder / cli.REPORT}")
  # No launcher starts these.
  over = (state_lib.DAMAGED, state_lib.DIVERGED)
  return result or _outcome([run for run in progress if run.status in over])


def _check_data(runs: Sequence[grid.Run], offline: bool) -> None:
  """Refuses runs whose text is too short or not of their vocabulary."""
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


def _status(experiment: cli.Experiment, options: argparse.Namespace) -> int:
  while True:
    progress = _progress(options, full=False)
    text = monitor.table(progress)
    if not options.watch > 0:
      print(text)
      return int(any(map(_is_bad, progress)))
    # Home and clear, so that the table stays in place.
    print("\x1b[H\x1b[2J", end="", file=text_table.unfiltered(sys.stdout))
    print(text, flush=True)
    time.sleep(min(options.watch, 3600.0))


def _collect(experiment: cli.Experiment, options: argparse.Namespace) -> int:
  progress = _progress(options)
  path = epath.Path(options.out or epath.Path(options.workdir) / cli.ROWS)
  rows = monitor.rows(progress)
  files.check_output("--out", path, ("run", "validation_loss"))
  if not files.is_remote(path):
    path.parent.mkdir(parents=True, exist_ok=True)
  csv_rows.write(path, rows)
  print(f"{len(rows)} of {len(progress)} runs: {path}")
  return _outcome(progress)


def _report(experiment: cli.Experiment, options: argparse.Namespace) -> int:
  progress, folder = _progress(options), epath.Path(options.workdir)
  _write_report(experiment, folder, progress)
  print(folder / cli.REPORT)
  return _outcome(progress)


def _write_report(
  experiment: cli.Experiment,
  folder: epath.Path,
  progress: Sequence[monitor.Progress],
) -> None:
  files.write(folder / cli.REPORT, experiment.render(folder, progress))


def _line(progress: Sequence[monitor.Progress], parallel: int) -> str:
  """How far the runs of a launch are."""
  text = monitor.summary(progress, parallel)
  running = [run for run in progress if run.status == state_lib.RUNNING]
  steps = ", ".join(f"{run.name} {run.step}/{run.steps}" for run in running)
  return f"{text}: {steps}" if steps else text


def _is_bad(progress: monitor.Progress) -> bool:
  return progress.status in state_lib.BAD


def _outcome(progress: Sequence[monitor.Progress]) -> int:
  """The exit status; prints the errors of runs."""
  bad = [run for run in progress if _is_bad(run)]
  for line in monitor.errors(bad):
    print(f"error: {line}", file=sys.stderr)
  return 1 if bad else 0


_ACTIONS = {
  "run": _run,
  "status": _status,
  "collect": _collect,
  "report": _report,
}


def _progress(
  options: argparse.Namespace, full: bool = True
) -> list[monitor.Progress]:
  """Progress of the selected runs of a folder, which must contain a sweep."""
  progress = monitor.of_folder(options.workdir, full)
  if not progress:
    raise config_lib.ConfigError(
      f"--workdir: got {options.workdir!r}, expected the folder of a sweep"
    )
  if options.given & {"config", "config_fields", "sweep", "seeds"}:
    source = folder_lib.source(options.workdir)
    if source != (given := cli.source(options)):
      accepted = f"{source}, which made {options.workdir}"
      config_lib.fail_argument("--config", given, accepted)
  return grid.select(progress, options.only)


def _settings(given: Sequence[str]) -> dict[str, str]:
  settings = {}
  for pair in given:
    name, equals, value = pair.partition("=")
    if not equals:
      raise config_lib.ConfigError(f"--set: got {pair!r}, expected name=value")
    settings[name] = value
  return settings


@contextlib.contextmanager
def _regularly(action: Callable[[], object], seconds: float) -> Iterator[None]:
  """Calls something now and then while open, on a thread."""
  over = threading.Event()

  def loop():
    while not over.wait(seconds):
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
