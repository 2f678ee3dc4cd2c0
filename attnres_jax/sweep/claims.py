# SPDX-License-Identifier: Apache-2.0
"""At most one worker per run, whoever starts workers and however they die.

On a disk a worker holds a lock of the kernel's (flock) as long as it lives;
when it dies, by whatever means, the lock is gone. That holds on local disks and
on network disks whose server keeps locks.

An object store has no locks and no conditional write that would be the same
everywhere, so there a claim is a lease: the worker writes its token and a
heartbeat into the state file, waits, and reads whose token is there; it has the
run as long as it finds its own. Two workers can both get a lease if a write
takes longer than `SETTLE_SECONDS`; both find out at the next heartbeat, and the
one whose token is gone ends on the spot. Till then each may write rows and
checkpoints of the same run: the same values, from the same configuration.
"""

import dataclasses
import fcntl
import os
import socket
import sys
import threading
import time
from typing import IO
import uuid

from etils import epath

from attnres_jax import files
from attnres_jax.sweep import exits
from attnres_jax.sweep import state as state_lib

LOCK = "lock"
# Others look at a lock for a moment; who wants it waits them out.
PATIENCE_SECONDS = 1.0
SETTLE_SECONDS = 5.0


def acquire(workdir: epath.PathLike) -> "Claim | None":
  """Takes a run that is not done; None where it is, or another one has it."""
  workdir = epath.Path(workdir)
  lock = None
  if files.is_remote(workdir):
    if state_lib.read(workdir).is_alive():
      return None
  else:
    lock = _lock(workdir, fcntl.LOCK_EX, PATIENCE_SECONDS)
    if lock is None:
      return None
  old = state_lib.read(workdir)
  if old.status == state_lib.DONE:
    if lock is not None:
      lock.close()
    return None
  now = time.time()
  state = dataclasses.replace(
    old,
    status=state_lib.RUNNING,
    attempts=old.attempts + 1,
    host=socket.gethostname(),
    pid=os.getpid(),
    token=uuid.uuid4().hex,
    started=now,
    heartbeat=now,
    error="",
  )
  state_lib.write(workdir, state)
  if lock is None:
    time.sleep(SETTLE_SECONDS)
    if state_lib.read(workdir).token != state.token:
      return None
  return Claim(workdir, state, lock)


def is_held(workdir: epath.PathLike) -> bool:
  """Whether a living worker has the run."""
  workdir = epath.Path(workdir)
  if files.is_remote(workdir):
    return state_lib.read(workdir).is_alive()
  if not (workdir / LOCK).exists():
    return False
  lock = _lock(workdir, fcntl.LOCK_SH, 0.0)
  if lock is None:
    return True
  lock.close()
  return False


class Claim:
  """A run that this process has; beats until it is released."""

  def __init__(
    self,
    workdir: epath.Path,
    state: state_lib.State,
    lock: IO[str] | None,
  ):
    self._workdir = workdir
    self._state = state
    self._lock = lock
    self._earlier_seconds = state.seconds
    self._over = threading.Event()
    self._thread = threading.Thread(
      target=self._beat, name="heartbeat", daemon=True
    )
    self._thread.start()

  def release(self, status: str, error: str = "") -> None:
    """Writes how it ended, and lets go."""
    self._over.set()
    self._thread.join()
    self._state = dataclasses.replace(self._state, status=status, error=error)
    try:
      self._write()
    finally:
      if self._lock is not None:
        self._lock.close()

  def _beat(self) -> None:
    while not self._over.wait(state_lib.HEARTBEAT_SECONDS):
      try:
        if self._is_lost():
          print(
            f"error: {self._workdir}: another worker has taken this run",
            file=sys.stderr,
            flush=True,
          )
          # Anything that is still written could undo the other's work.
          os._exit(exits.Exit.BUSY)
        self._write()
      except OSError:
        # A full disk or a lost network ends the run where it writes results.
        continue

  def _is_lost(self) -> bool:
    if self._lock is not None:
      return False
    return state_lib.read(self._workdir).token != self._state.token

  def _write(self) -> None:
    now = time.time()
    seconds = self._earlier_seconds + now - self._state.started
    self._state = dataclasses.replace(
      self._state, heartbeat=now, seconds=seconds
    )
    state_lib.write(self._workdir, self._state)


def _lock(
  workdir: epath.Path, kind: int, patience_seconds: float
) -> IO[str] | None:
  """An open file with the lock on it, or None where another one has it."""
  # Closed on exec, so that no child of a worker keeps its lock.
  file = open(workdir / LOCK, "a", encoding="utf-8")
  deadline = time.monotonic() + patience_seconds
  while True:
    try:
      fcntl.flock(file, kind | fcntl.LOCK_NB)
      return file
    except BlockingIOError:
      if time.monotonic() >= deadline:
        file.close()
        return None
      time.sleep(0.05)
    except BaseException:
      file.close()
      raise
