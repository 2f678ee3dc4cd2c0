# SPDX-License-Identifier: Apache-2.0
"""Launchers start the workers of a sweep.

A launcher is a module `attnres_jax/sweep/launchers/<name>.py` with

  SETTINGS   {name: settings.Setting}: what `--set name=value` may say to it
  plan       (runs, folder, settings) -> Launch

and maybe

  start      (runs, folder, settings) -> exit status, if it trains by itself
  require    () -> None: raises ConfigError if a package is missing
  READERS    machines that have to reach the folder, which is then a bucket

`launch` is the driver of all of them. It prints the plan in a dry run. Else it
calls `start` or, without one, writes the files of the plan and prints the
commands. `plan` gets the runs that `todo` returns (in a dry run they may not
exist yet) and plans `worker.command` for each. `start` gets all runs, which
`folder.prepare` has created, and returns 0 only when all of them are done. A
failed or damaged run does not stop the others, and the exit status of a worker
(`attnres_jax.common.exits`) says whether to start it again. All of them raise
ConfigError if a setting or the folder cannot be used.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import importlib
import os
import types
from typing import Any

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax import sweep
from attnres_jax.common import files
from attnres_jax.config import errors
from attnres_jax.scaling import grid
from attnres_jax.sweep import state as state_lib
from attnres_jax.sweep.launchers import settings as settings_lib
from attnres_jax.train import claims

# In every script that a launcher writes: the worker that it starts.
MARKS = ("attnres_jax.sweep.worker",)
LAUNCHERS = sweep.LAUNCHERS
INTERRUPTED = 130  # The exit status.
# After a restart, the lease of the previous worker may still be valid.
PATIENCE_SECONDS = 2 * claims.LEASE_SECONDS
PATIENCE = f"--patience_seconds={PATIENCE_SECONDS:.0f}"


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of every launcher.

  Attributes:
    max_parallel: runs at a time.
    dry_run: print what would be started, exactly, and start nothing.
    settings: of this launcher; its `SETTINGS` are the names.
    only: expression for the names of runs, for workers that choose runs.
  """

  max_parallel: int = 1
  dry_run: bool = False
  settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
  only: str = ""


@dataclasses.dataclass(frozen=True)
class Launch:
  """What a launcher writes and what it, or a person, runs.

  Attributes:
    files: path -> text; each contains one of `MARKS`.
    commands: lines of a shell.
    setting: which setting names the file, or the folder of the files.
  """

  files: Mapping[str, str] = dataclasses.field(default_factory=dict)
  commands: Sequence[str] = ()
  setting: str = ""


def launch(
  name: str,
  runs: Sequence[grid.Run],
  folder: epath.PathLike,
  options: Options,
) -> int:
  """Starts the workers of runs, or says how; returns the exit status.

  Raises:
    ConfigError: a setting or the folder cannot be used, a file is not ours, or
      a package is missing.
  """
  module = load(name, options)
  settings = read(module, options)
  if hasattr(module, "READERS") and not files.is_remote(folder):
    accepted = f"a bucket such as gs://BUCKET/NAME, which {module.READERS} can"
    config_lib.fail_argument("--workdir", str(folder), f"{accepted} reach")
  # Workers may have a different working directory.
  folder = str(folder) if files.is_remote(folder) else os.path.abspath(folder)
  if hasattr(module, "start") and not options.dry_run:
    return module.start(runs, folder, settings)
  runs = todo(runs, folder, options)
  planned = module.plan(runs, folder, settings)
  setting = f"--set={planned.setting}"
  for path in planned.files:
    files.check_output(setting, path, MARKS)
  if not runs:
    print("no run is left to train")
  elif options.dry_run:
    print("---\n".join(planned.files.values()), end="")
    # So that what is printed is still a manifest or a script.
    mark = "# " if planned.files else ""
    print("".join(f"{mark}{line}\n" for line in planned.commands), end="")
  else:
    for path, text in planned.files.items():
      files.write_output(setting, path, text, MARKS)
    place = getattr(settings, planned.setting) if planned.files else folder
    print("\n  ".join([f"# {len(runs)} runs in {place}", *planned.commands]))
  return 0


def read(module: Any, options: Options) -> types.SimpleNamespace:
  """All settings of a launcher, with `options` of the launch.

  Raises:
    ConfigError: one cannot be used, or is missing.
  """
  values = settings_lib.read(module.SETTINGS, options.settings)
  values.options = options
  return values


def load(name: str, options: Options) -> Any:
  """The launcher with this name, after checking its settings.

  Raises:
    ConfigError: no such launcher or setting, or a package is missing.
  """
  errors.check_in("--launcher", name, LAUNCHERS)
  module = importlib.import_module(f"{__name__}.{name}")
  for setting in options.settings:
    errors.check_in("--set", setting, module.SETTINGS)
  if hasattr(module, "require") and not options.dry_run:
    module.require()
  return module


def todo(
  runs: Sequence[grid.Run],
  folder: epath.PathLike,
  options: Options = Options(),
) -> list[grid.Run]:
  """The runs to start workers for: neither done, diverged nor damaged.

  A launch makes refused ones pending: a person may have mended what was wrong,
  and workers without a name of a run leave refused ones alone. In a dry run
  with a bucket, which need not exist or be reachable, all runs.
  """
  if options.dry_run and files.is_remote(folder):
    return list(runs)
  over = (state_lib.DONE, state_lib.DIVERGED, state_lib.DAMAGED)
  open_runs = []
  for run in runs:
    workdir = epath.Path(folder) / run.name
    state = state_lib.read(workdir)
    if state.status == state_lib.REFUSED and not options.dry_run:
      state = dataclasses.replace(state, status=state_lib.PENDING)
      state_lib.write(workdir, state)
    if state.status not in over:
      open_runs.append(run)
  return open_runs
