# SPDX-License-Identifier: Apache-2.0
"""A worker claims runs of a sweep's folder and trains them.

`worker` has its command, and checks the flags before this module imports JAX.
"""

import collections
from collections.abc import Mapping, Sequence
import contextlib
import functools
import os
import socket
import sys
import tempfile
import time
import traceback
from typing import Any

from etils import epath
import jax

from attnres_jax import config as config_lib
from attnres_jax.common import exits
from attnres_jax.common import files
from attnres_jax.common import plans
from attnres_jax.common import processes
from attnres_jax.config import errors
from attnres_jax.scaling import grid
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import queue
from attnres_jax.sweep import state as state_lib
from attnres_jax.train import account
from attnres_jax.train import claims
from attnres_jax.train import loop
from attnres_jax.train import metrics

ERROR = "error.txt"
_POLL_SECONDS = 5.0

Exit = exits.Exit


def run(
  folder: epath.PathLike, name: str, patience_seconds: float = 0.0
) -> Exit:
  """Claims and trains a run of a sweep; all processes of the run call it.

  Signals only stop it in the main thread. If there are several processes, call
  `jax.distributed.initialize` first. It waits for a run whose worker may be
  dead. In an object store, this is only known after `claims.LEASE_SECONDS`.

  Raises:
    ConfigError: there is no such run.
  """
  described = folder_lib.read_run(folder, name)
  workdir = epath.Path(folder) / name
  attempt, over = None, -1
  if processes.is_first():
    attempt, over = _begin(workdir, patience_seconds)
  if (over := processes.number_of_first(over)) >= 0:
    return Exit(over)
  result, error = _train(described, workdir, attempt)
  if result == Exit.NEVER and not processes.all_come(f"{name} is refused"):
    # The input of this process alone: the others wait for it in vain.
    result = Exit.AGAIN
  if attempt is not None:
    try:
      attempt.end(state_lib.OF_EXIT[result], error)
    except OSError as failure:
      say_failure(name, failure)
      result = Exit.AGAIN
  return result


def run_all(
  folder: epath.PathLike, patience_seconds: float = 0.0, only: str = ""
) -> Exit:
  """Trains the open runs of a sweep one after another; all processes call it.

  `only` is a regular expression over their names. Once no run is open, it waits
  for runs that other workers hold and may leave.

  Returns:
    DONE if every run is done or held by a live worker; otherwise how one of the
    others ended.

  Raises:
    ConfigError: the folder has no such runs, or a damaged list of runs.
  """
  tries: collections.Counter[str] = collections.Counter()
  deadline = time.monotonic() + patience_seconds
  expression = grid.compile_pattern(only)
  is_first = processes.is_first()
  claim_of = functools.partial(_claim_of, folder)
  while True:
    names = [n for n in folder_lib.names(folder) if expression.search(n)]
    if not names and only:
      config_lib.fail_argument("--only", only, f"names of runs in {folder}")
    if not names:
      config_lib.fail_argument("--folder", str(folder), "the folder of a sweep")
    states = _states(folder, names) if is_first else {}
    name = queue.choose(states, tries, claim_of)
    if name == queue.WAIT and time.monotonic() >= deadline:
      name = queue.NONE_LEFT
    # Its name, since a launch may change the list while processes read it.
    name = processes.text_of_first(name)
    if name == queue.NONE_LEFT:
      break
    if name == queue.WAIT:
      time.sleep(min(_POLL_SECONDS, patience_seconds))
      continue
    tries[name] += 1
    print(f"worker: {name}", flush=True)
    result = run(folder, name)
    print(f"worker: {name}: {result.name.lower()}", flush=True)
    if result == Exit.STOPPED:
      return result
    if jax.process_count() > 1 and result == Exit.AGAIN:
      # Another process may be gone, or wait for this one; all start again
      # together.
      return Exit.AGAIN
    deadline = time.monotonic() + patience_seconds
  states = _states(folder, names) if is_first else {}
  return Exit(processes.number_of_first(queue.outcome(states, claim_of)))


def keep_programs(folder: str) -> None:
  """Keeps compiled programs for later runs; settings of the user count."""
  if jax.config.values["jax_compilation_cache_dir"]:
    return
  cache = epath.Path(folder) / folder_lib.COMPILED
  if files.is_remote(folder):
    cache = epath.Path(tempfile.gettempdir()) / f"attnres_jax_{os.getuid()}"
  elif not (epath.Path(folder) / folder_lib.SWEEP).exists():
    return  # Nothing is trained in a folder without a sweep.
  jax.config.update("jax_compilation_cache_dir", str(cache))
  if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _states(folder: epath.PathLike, names: Sequence[str]) -> queue.States:
  return {name: state_lib.read(epath.Path(folder) / name) for name in names}


def _claim_of(folder: epath.PathLike, name: str) -> str:
  """Who has a run that was open when its state was read."""
  workdir = epath.Path(folder) / name
  try:
    if claims.is_held(workdir):
      return queue.HELD
    # Its worker may have ended it since.
    is_over = state_lib.read(workdir).status not in state_lib.OPEN
    folder_lib.read_run(folder, name)
    return queue.HELD if is_over else queue.FREE
  except config_lib.ConfigError:
    return queue.BROKEN


def _begin(
  workdir: epath.Path, patience_seconds: float
) -> tuple[state_lib.Attempt | None, int]:
  """An attempt, and -1, or the exit status without one."""
  deadline = time.monotonic() + patience_seconds
  while True:
    try:
      attempt = state_lib.begin(workdir)
    except (config_lib.ConfigError, OSError) as error:
      _say(f"error: {error}")
      return None, exits.of_error(error)
    if attempt is not None:
      return attempt, -1
    if state_lib.read(workdir).status == state_lib.DONE:
      return None, Exit.DONE
    if time.monotonic() >= deadline:
      _say(f"{workdir.name}: another worker is training it")
      return None, Exit.AGAIN
    time.sleep(claims.HEARTBEAT_SECONDS)


def _train(
  run: grid.Run, workdir: epath.Path, attempt: state_lib.Attempt | None
) -> tuple[Exit, str]:
  """How the run ended, and its error for the state file."""
  try:
    config = folder_lib.run_config(run)
    summary = loop.train_and_evaluate(
      config,
      workdir,
      claim=None if attempt is None else attempt.claim,
      plans=workdir.parent / plans.COPY,
    )
  except Exception as error:
    errors.without_jax_notes(error)
    text = " ".join(f"{type(error).__name__}: {error}".split())
    trace = traceback.format_exc()
    if files.is_disk_full(error):
      say_failure(run.name, error)
    else:
      _say(trace)
    _leave_error(workdir, attempt, text, trace)
    return exits.of_error(error), text
  if attempt is not None and "tokens" in summary:  # Not in old ones.
    # As `status` shows it, and more than in the summary; see `state.State`.
    cost = {"tokens": summary["tokens"], "chip_hours": attempt.chip_hours}
    print(account.end_line(cost))
  if summary["status"] == "stopped":
    return Exit.STOPPED, ""
  diverged = _diverged(summary, config)
  if diverged:
    _leave_error(workdir, attempt, diverged, "")
    return Exit.DIVERGED, diverged
  return Exit.DONE, ""


def _leave_error(
  workdir: epath.Path,
  attempt: state_lib.Attempt | None,
  text: str,
  trace: str,
) -> None:
  """Writes error.txt; error.N.txt on process N of several."""
  index = jax.process_index()
  number = "" if attempt is None else f"attempt {attempt.number}, "
  at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
  name = f"error.{index}.txt" if index else ERROR
  # The disk or store may be what failed; the text is in the log.
  with contextlib.suppress(OSError, ValueError):
    step = metrics.last_rows(workdir).get("train", {}).get("step", 0)
    head = f"{number}step {step}, process {index} on {socket.gethostname()}"
    files.write(workdir / name, f"{head}, {at}\n{text}\n\n{trace}")


def _diverged(summary: Mapping[str, Any], config: config_lib.RunConfig) -> str:
  """Why a finished run counts as diverged; empty if it does not."""
  steps, skipped = summary["step"], summary.get("skipped", 0)
  most = config.train.max_skipped_share
  if skipped > most * steps:
    return (
      f"{skipped} of {steps} steps were skipped, since a loss or gradient was"
      f" not finite; train.max_skipped_share is {most:g}"
    )
  if processes.is_first() and summary.get("validation_loss") is None:
    return "the validation loss is not finite"
  return ""


def say_failure(name: str, error: Exception) -> None:
  """One line: where, and of a disk the bytes needed and free."""
  where = getattr(error, "filename", None) or name
  where = f"{where}: " if where else ""
  text = str(getattr(error, "strerror", None) or error)
  _say(f"error: {where}{' '.join(text.split())}")


def _say(text: str) -> None:
  with contextlib.suppress(OSError):  # The log may be on a full disk.
    print(text, file=sys.stderr, flush=True)
