# SPDX-License-Identifier: Apache-2.0
"""Launchers start the workers of a sweep.

A launcher is a module `attnres_jax/sweep/launchers/<name>.py` with

  SETTINGS   {name: settings.Setting}: what `--set name=value` may say to it
  launch     (runs, folder, options) -> exit status

and maybe

  require    () -> None: raises ConfigError if a package is missing

`launch` gets runs that `folder.prepare` has created (with `options.dry_run`
they may not exist yet). It starts `worker.command` for the runs that `todo`
returns. It returns 0 only when all of them are done (or started, if runs
continue without the launcher). A failed or damaged run does not stop the
others, and the exit status of a worker (`attnres_jax.common.exits`) says
whether to start it again. It raises ConfigError if a setting or the folder
cannot be used, or a package is missing.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import importlib
from typing import Any

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax import sweep
from attnres_jax.common import files
from attnres_jax.scaling import grid
from attnres_jax.sweep import state as state_lib

# In every script that a launcher writes: the worker that it starts.
MARKS = ("attnres_jax.sweep.worker",)
LAUNCHERS = sweep.LAUNCHERS


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


def load(name: str, options: Options) -> Any:
  """The launcher with this name, after checking its settings.

  Raises:
    ConfigError: no such launcher or setting, or a package is missing.
  """
  if name not in LAUNCHERS:
    raise config_lib.ConfigError(
      f"--launcher: got {name!r}, expected one of " + ", ".join(LAUNCHERS)
    )
  module = importlib.import_module(f"{__name__}.{name}")
  for setting in options.settings:
    if setting not in module.SETTINGS:
      accepted = ", ".join(module.SETTINGS) or "none"
      raise config_lib.ConfigError(
        f"--set: got {setting!r}, expected a setting of {name}: {accepted}"
      )
  if hasattr(module, "require") and not options.dry_run:
    module.require()
  return module


def check_bucket(folder: epath.PathLike, readers: str) -> None:
  """Refuses a folder that machines elsewhere cannot reach.

  Args:
    folder: of the sweep.
    readers: these machines, for the error.

  Raises:
    ConfigError: the folder is on a disk.
  """
  if not files.is_remote(folder):
    config_lib.fail_argument(
      "--workdir",
      str(folder),
      f"a bucket such as gs://BUCKET/NAME, which {readers} can reach",
    )


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
