# SPDX-License-Identifier: Apache-2.0
"""Trains one run of a sweep's folder; the command that every launcher starts.

  python -m attnres_jax.sweep.worker --folder=runs/scaling --run=NAME

You can start any number of these, anywhere and repeatedly. A worker skips a run
that is done or that another live worker is training; it claims any other run
and resumes it from the last checkpoint. SIGTERM or SIGINT makes it save and
stop. The exit status says how it ended, see `exits.Exit`.

For a run over several processes, start the same command once per process with
--distributed. On a pod, JAX finds the cluster by itself; elsewhere, describe it
as for `attnres_jax.main`. The first process claims the run for all of them.
"""

import argparse
from collections.abc import Mapping, Sequence
import functools
import os
import sys
import time
import traceback
from typing import Any, NoReturn

from etils import epath
import jax
from jax.experimental import multihost_utils
import numpy as np

from attnres_jax import claims as claims_lib
from attnres_jax import command_line
from attnres_jax import config as config_lib
from attnres_jax import files
from attnres_jax import plans
from attnres_jax import train
from attnres_jax.scaling import grid
from attnres_jax.sweep import branches
from attnres_jax.sweep import claims
from attnres_jax.sweep import exits
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import state as state_lib


def command(
  folder: epath.PathLike, name: str, *flags: str, python: str = "python"
) -> list[str]:
  """The command for a run, on any machine that has this package."""
  return [
    python, "-m", "attnres_jax.sweep.worker", f"--folder={folder}",
    f"--run={name}", *flags,
  ]  # fmt: skip


def work(
  folder: epath.PathLike, name: str, patience_seconds: float = 0.0
) -> exits.Exit:
  """Claims and trains a run; all processes of the run call it.

  Signals only stop it in the main thread. If there are several processes, call
  `jax.distributed.initialize` first.

  Args:
    folder: of the sweep.
    name: of the run.
    patience_seconds: how long to wait for a run whose worker may be dead. In an
      object store, this is only known after `claims.LEASE_SECONDS`.

  Raises:
    ConfigError: there is no such run.
  """
  run = folder_lib.read_run(folder, name)
  workdir = epath.Path(folder) / name
  claim, verdict = None, None
  if not jax.distributed.is_initialized() or jax.process_index() == 0:
    claim, verdict = _claim(workdir, patience_seconds)
  verdict = _agree(verdict)
  if verdict is not None:
    return verdict
  status, error, result = _train(run, workdir, claim)
  if claim is not None:
    try:
      claim.release(status, error)
    except OSError as failure:
      if not files.is_disk_full(failure):
        raise
      if result != exits.Exit.DISK_FULL:
        _say_disk_full(failure, workdir)
      result = exits.Exit.DISK_FULL
  return result


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  options = _parse_options(argv)
  return command_line.run(_work, options)


def _work(options: argparse.Namespace) -> int:
  command_line.connect(options)
  files.check_folder("--folder", options.folder)
  result = work(options.folder, options.run, options.patience_seconds)
  if result == exits.Exit.DISK_FULL:
    # Buffered output cannot be written either; avoid a second error about it.
    os._exit(result)
  if result == exits.Exit.FAILED and options.distributed:
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit would wait for the other processes, which may be dead.
    os._exit(result)
  if result == exits.Exit.BUSY:
    _say(f"{options.run}: another worker is training it")
  return result


def _claim(
  workdir: epath.Path, patience_seconds: float
) -> tuple[claims.Claim | None, exits.Exit | None]:
  """A claim, or the exit status without one."""
  deadline = time.monotonic() + patience_seconds
  while True:
    try:
      claim = claims.acquire(workdir)
    except config_lib.ConfigError as error:
      _say(f"error: {error}")
      return None, exits.Exit.UNUSABLE
    if claim is not None:
      return claim, None
    if state_lib.read(workdir).status == state_lib.DONE:
      return None, exits.Exit.DONE
    if time.monotonic() >= deadline:
      return None, exits.Exit.BUSY
    time.sleep(claims_lib.HEARTBEAT_SECONDS)


def _train(
  run: grid.Run, workdir: epath.Path, claim: claims.Claim | None
) -> tuple[str, str, exits.Exit]:
  """Status and error for the state file, and the exit status."""
  try:
    if jax.process_index() == 0:
      step = branches.start(workdir.parent, run)
      if step:
        print(f"begins at step {step}, with a checkpoint of {run.branch_of}")
    config = folder_lib.run_config(run)
    summary = train.train_and_evaluate(
      config,
      workdir,
      claim=None if claim is None else claim.claim,
      leave=functools.partial(_leave_early, claim),
      plans=workdir.parent / plans.COPY,
    )
  except Exception as error:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if files.is_disk_full(error):
      _say_disk_full(error, workdir)
      return state_lib.FAILED, text, exits.Exit.DISK_FULL
    traceback.print_exc()
    return state_lib.FAILED, text, exits.Exit.FAILED
  if summary["status"] == "stopped":
    return state_lib.STOPPED, "", exits.Exit.STOPPED
  diverged = _diverged(summary, config)
  if diverged:
    return state_lib.FAILED, diverged, exits.Exit.FAILED
  return state_lib.DONE, "", exits.Exit.DONE


def _say_disk_full(error: Exception, workdir: epath.Path) -> None:
  """One line: where, and the bytes needed (if the error knows) and free."""
  if not isinstance(error, files.DiskFullError):
    error = files.disk_full(workdir)
  _say(f"error: {error.filename}: {error.strerror}")


def _diverged(summary: Mapping[str, Any], config: config_lib.RunConfig) -> str:
  """Why a finished run counts as failed; empty if it does not."""
  steps, skipped = summary["step"], summary.get("skipped", 0)
  most = config.train.max_skipped_share
  if skipped > most * steps:
    return (
      f"{skipped} of {steps} steps were skipped, since a loss or gradient was"
      f" not finite; train.max_skipped_share is {most:g}"
    )
  if jax.process_index() == 0 and summary.get("validation_loss") is None:
    return "the validation loss is not finite"
  return ""


def _leave_early(claim: claims.Claim | None, step: int) -> NoReturn:
  """Ends this process even while its main thread is compiling."""
  del step
  if claim is not None:
    claim.release(state_lib.STOPPED)
  os._exit(exits.Exit.STOPPED)


def _agree(verdict: exits.Exit | None) -> exits.Exit | None:
  """The decision of the first process; None for "train"."""
  if not jax.distributed.is_initialized():
    return verdict
  value = np.int32(-1 if verdict is None else verdict)
  agreed = int(multihost_utils.broadcast_one_to_all(value))
  return None if agreed < 0 else exits.Exit(agreed)


def _say(text: str) -> None:
  try:
    print(text, file=sys.stderr, flush=True)
  except OSError:
    pass  # The log may be on the disk that is full.


def _parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
  parser = command_line.Parser("python -m attnres_jax.sweep.worker", __doc__)
  parser.add_argument("--folder", required=True, help="of the sweep")
  parser.add_argument("--run", required=True, help="name of the run")
  command_line.add_cluster(parser)
  parser.add_argument(
    "--patience_seconds", type=float, default=0.0,
    help="to wait for a run whose worker may be dead",
  )  # fmt: skip
  return parser.parse_args(argv)


if __name__ == "__main__":
  sys.exit(main())
