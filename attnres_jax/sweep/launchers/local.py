# SPDX-License-Identifier: Apache-2.0
"""A queue of processes on this machine.

It runs up to `max_parallel` workers at a time; their output goes to log.txt in
the workdirs. Each worker gets its share of the cores, since runs that compete
for cores slow each other down. A worker that is killed or meets an error that
another attempt may not meet is started again; one that diverged or was refused
is not.

On Ctrl-C, SIGTERM or a closed terminal, the workers save and stop; a second
signal kills them. If a worker of another launcher holds a run, or a store
fails, this launcher looks again after a while, so that a launch ends when all
runs have ended.
"""

from collections.abc import Mapping, Sequence
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
import types
from typing import Any

from etils import epath

from attnres_jax.common import environment
from attnres_jax.common import exits
from attnres_jax.common import files
from attnres_jax.scaling import grid
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import launchers
from attnres_jax.sweep import state as state_lib
from attnres_jax.sweep import worker
from attnres_jax.sweep.launchers import settings as settings_lib
from attnres_jax.train import claims
from attnres_jax.train import signals

SETTINGS: Mapping[str, settings_lib.Setting] = {
  "max_restarts": settings_lib.Setting(
    "restarts per run after errors that another attempt may not meet", 1, int,
    least=0,
  ),
}  # fmt: skip

# Polling intervals: of the processes, and of runs that others hold, on a disk
# and in a bucket.
_TICK_SECONDS = 0.1
_HELD_SECONDS, _HELD_REMOTE_SECONDS = 1.0, 15.0


def plan(
  runs: Sequence[grid.Run], folder: str, settings: types.SimpleNamespace
) -> launchers.Launch:
  """The worker of each run."""
  del settings
  commands = [shlex.join(_command(folder, run)) for run in runs]
  return launchers.Launch(commands=commands)


def start(
  runs: Sequence[grid.Run], folder: str, settings: types.SimpleNamespace
) -> int:
  """Runs all workers; returns what the package says, or 130 if stopped."""
  options = settings.options
  queue = _Queue(runs, epath.Path(folder), options, settings.max_restarts)
  with signals.calling(lambda number, frame: queue.stop()):
    return queue.run()


class _Queue:
  """Waiting runs, and the processes of the others."""

  def __init__(
    self,
    runs: Sequence[grid.Run],
    folder: epath.Path,
    options: launchers.Options,
    max_restarts: int,
  ):
    self._folder = folder
    self._options = options
    self._waiting = list(runs)
    self._restarts = {run.name: max_restarts for run in runs}
    # The run of each slot, and its process.
    self._slots: list[tuple[grid.Run, subprocess.Popen] | None]
    self._slots = [None] * options.max_parallel
    self._failed: list[str] = []
    self._next_fill = 0.0
    self.signals = 0

  def run(self) -> int:
    try:
      while self._waiting or any(self._slots):
        self._reap()
        if self.signals:
          self._waiting = []
        elif None in self._slots:
          self._fill()
        time.sleep(_TICK_SECONDS)
    except BaseException:
      # No worker outlives its launcher; they save and stop.
      self.stop()
      for _, process in filter(None, self._slots):
        process.wait()
      raise
    if self.signals:
      print("stopped; rerun the same command to resume", file=sys.stderr)
      return launchers.INTERRUPTED
    return 1 if self._failed else 0

  def stop(self) -> None:
    """Passes a signal on: the first stops workers, the second kills them."""
    self.signals += 1
    kind = signal.SIGTERM if self.signals == 1 else signal.SIGKILL
    for _, process in filter(None, self._slots):
      process.send_signal(kind)

  def _fill(self) -> None:
    if time.monotonic() < self._next_fill:
      return
    for run in list(self._waiting):
      try:
        if not launchers.todo([run], self._folder, self._options):
          self._waiting.remove(run)
          continue
        if claims.is_held(self._folder / run.name):
          continue
        if None not in self._slots or self.signals:
          return
        slot = self._slots.index(None)
        cores = _cores(slot, len(self._slots))
        self._slots[slot] = run, _start(run, self._folder, cores)
      except (OSError, ValueError) as error:
        if files.is_remote(self._folder) and isinstance(error, OSError):
          print(f"{error}; trying again", flush=True)
          break
        self._fail(run, str(error))
      self._waiting.remove(run)
    # The remaining runs are held by other workers, or their store fails.
    remote = files.is_remote(self._folder)
    pause = _HELD_REMOTE_SECONDS if remote else _HELD_SECONDS
    self._next_fill = time.monotonic() + pause

  def _reap(self) -> None:
    for slot, taken in enumerate(self._slots):
      if taken is None or (code := taken[1].poll()) is None:
        continue
      self._slots[slot] = None
      self._next_fill = 0.0
      run, _ = taken
      try:
        self._ended(run, code)
      except files.DiskFullError:
        raise
      except OSError as error:  # Of the store, which `_fill` asks again.
        print(f"{run.name}: {error}", flush=True)
        self._waiting.append(run)

  def _ended(self, run: grid.Run, code: int) -> None:
    """Decides what follows the end of a run's process."""
    if code == exits.Exit.DONE:
      print(f"{run.name} done", flush=True)
    elif code == exits.Exit.AGAIN and self._is_full(run):
      raise files.disk_full(self._folder)
    elif self.signals:
      pass
    elif code == exits.Exit.AGAIN and claims.is_held(self._folder / run.name):
      self._waiting.append(run)
      self._next_fill = time.monotonic() + _HELD_SECONDS
    else:
      self._end(run, code)

  def _is_full(self, run: grid.Run) -> bool:
    """Whether the last line of a log says that the disk, which all use, is."""
    log = self._folder / run.name / folder_lib.LOG
    end = files.read(log, -4096) if log.exists() else b""
    return files.is_disk_full(OSError(end.strip().rpartition(b"\n")[2]))

  def _end(self, run: grid.Run, code: int) -> None:
    """Starts a run again after an error, or reports it."""
    state = state_lib.read(self._folder / run.name)
    if state.status == state_lib.DONE:  # By another worker, meanwhile.
      return
    cause = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
    cause = f"({cause}){': ' + state.error if state.error else ''}"
    final = code in (exits.Exit.NEVER, exits.Exit.DIVERGED)
    if final or not self._restarts[run.name]:
      self._fail(run, cause, state.status if final else state_lib.FAILED)
      return
    self._restarts[run.name] -= 1
    self._waiting.append(run)
    print(f"{run.name} {state_lib.FAILED} {cause}; trying again", flush=True)

  def _fail(
    self, run: grid.Run, cause: str, status: str = state_lib.FAILED
  ) -> None:
    self._failed.append(run.name)
    log = self._folder / run.name / folder_lib.LOG
    print(f"{run.name} {status} {cause}; see {log}", flush=True)


def _start(
  run: grid.Run, folder: epath.Path, cores: Sequence[int] | None
) -> subprocess.Popen:
  """A worker of one run."""
  output: Any = None
  with contextlib.ExitStack() as stack:
    if not files.is_remote(folder):
      path = folder / run.name / folder_lib.LOG
      output = stack.enter_context(open(path, "a", encoding="utf-8"))
    process = subprocess.Popen(
      _command(folder, run),
      stdin=subprocess.DEVNULL,
      stdout=output,
      stderr=output,
      # A Ctrl-C at the terminal reaches only the launcher, once.
      start_new_session=True,
    )
  if cores is not None:
    # It may be over, or the machine may have taken a core away.
    with contextlib.suppress(OSError):
      os.sched_setaffinity(process.pid, cores)
  return process


def _command(folder: epath.PathLike, run: grid.Run) -> list[str]:
  return worker.command(folder, run.name, python=sys.executable)


def _cores(slot: int, slots: int) -> list[int] | None:
  """The cores of one slot; None for all, if there are too few to divide."""
  cores = environment.cores()
  if slots == 1 or slots > len(cores) or not hasattr(os, "sched_setaffinity"):
    return None
  return cores[slot::slots]
