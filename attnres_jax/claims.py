# SPDX-License-Identifier: Apache-2.0
"""At most one writer per run folder, however it is started and dies.

On a disk, a writer holds a kernel lock (flock) on the file `lock` as long as it
lives; however it dies, the lock is released. This works on local disks and on
network disks whose server supports locks.

Object stores have no locks and no common form of conditional write, so there a
claim is a lease: the writer puts its token and a heartbeat into `lock`, waits,
and reads the file again. It holds the folder as long as it finds its own token.
If a write takes longer than `SETTLE_SECONDS`, two writers can both get a lease;
both notice at the next heartbeat, and the one whose token is gone exits
immediately. Until then, both may write rows and checkpoints of the same run:
the same values, from the same configuration.

In both cases `lock` names the holder, for the error of a process that is
refused.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import socket
import sys
import threading
import time
from typing import IO
import uuid

from etils import epath
import jax
from jax.experimental import multihost_utils
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import files

LOCK = "lock"
# Other processes hold a lock briefly to look at it; wait until they are done.
PATIENCE_SECONDS = 1.0
SETTLE_SECONDS = 5.0
HEARTBEAT_SECONDS = 10.0
# A writer whose heartbeat is older than this is considered dead. The clocks of
# hosts that share an object store must agree to within a fraction of it.
LEASE_SECONDS = 90.0
# The longest message from the first process to the others, in bytes.
_MESSAGE_BYTES = 1024


class HeldError(config_lib.ConfigError):
  """Another live process holds the folder."""


@dataclasses.dataclass(frozen=True)
class Holder:
  """The holder of a folder.

  Attributes:
    host: where the process runs.
    pid: its process id there.
    token: distinguishes it from all other holders.
    started: when it claimed the folder, seconds since the epoch.
    heartbeat: when it was last seen, in the same unit; updated in object stores
      only.
  """

  host: str
  pid: int
  token: str
  started: float
  heartbeat: float

  def is_alive(self) -> bool:
    """Whether it was seen recently."""
    return time.time() - self.heartbeat < LEASE_SECONDS

  def __str__(self) -> str:
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.started))
    return f"process {self.pid} on {self.host}, started {started}"


class Claim:
  """A folder that this process holds until it releases it or exits.

  Attributes:
    holder: this process, as others see it.
    on_beat: called every `HEARTBEAT_SECONDS`, on a thread of the claim.
  """

  def __init__(
    self,
    workdir: epath.Path,
    holder: Holder,
    lock: IO[str] | None,
    lost_status: int,
  ):
    self.holder = holder
    self.on_beat: Callable[[], None] | None = None
    self._workdir = workdir
    self._lock = lock
    self._lost_status = lost_status
    self._over = threading.Event()
    self._thread = threading.Thread(
      target=self._beat, name="heartbeat", daemon=True
    )
    self._thread.start()

  def release(self, last: Callable[[], None] = lambda: None) -> None:
    """Stops the heartbeat, calls `last`, and releases the folder."""
    self._over.set()
    self._thread.join()
    try:
      last()
    finally:
      if self._lock is not None:
        self._lock.close()
      elif not self._is_lost():
        (self._workdir / LOCK).unlink(missing_ok=True)

  def _beat(self) -> None:
    while not self._over.wait(HEARTBEAT_SECONDS):
      try:
        if self._is_lost():
          print(
            f"error: {self._workdir}: another process has taken this run",
            file=sys.stderr,
            flush=True,
          )
          # Anything written from here on could undo the other process's work.
          os._exit(self._lost_status)
        if self._lock is None:
          self.holder = dataclasses.replace(self.holder, heartbeat=time.time())
          _write(self._workdir, self.holder)
        if self.on_beat is not None:
          self.on_beat()
      except OSError:
        # A full disk or a lost network ends the run when it writes results.
        continue

  def _is_lost(self) -> bool:
    if self._lock is not None:
      return False
    holder = _read(self._workdir)
    return holder is not None and holder.token != self.holder.token


def acquire(
  workdir: epath.PathLike,
  *,
  patience_seconds: float = 0.0,
  lost_status: int = 1,
) -> Claim:
  """Claims a folder, which is created if needed.

  Args:
    workdir: local or gs://.
    patience_seconds: how long to wait for a lease whose holder may be dead.
      Waiting ends early if the holder turns out to be alive.
    lost_status: exit status of this process if another takes its lease.

  Raises:
    HeldError: another process holds it; names the process.
    OSError: nothing can be written there.
  """
  workdir = epath.Path(workdir)
  workdir.mkdir(parents=True, exist_ok=True)
  now = time.time()
  holder = Holder(socket.gethostname(), os.getpid(), uuid.uuid4().hex, now, now)
  if not _has_locks(workdir):
    _take_lease(workdir, holder, patience_seconds)
    return Claim(workdir, holder, None, lost_status)
  lock = _lock(workdir, fcntl.LOCK_EX, PATIENCE_SECONDS)
  if lock is None:
    raise _held(workdir)
  # Locks work on a full disk too, but their owner is then not named.
  with contextlib.suppress(OSError):
    os.ftruncate(lock.fileno(), 0)
    os.write(lock.fileno(), json.dumps(dataclasses.asdict(holder)).encode())
  return Claim(workdir, holder, lock, lost_status)


@contextlib.contextmanager
def held(
  workdir: epath.PathLike, ours: Claim | None = None
) -> Iterator[Claim | None]:
  """A context for work in a folder; all processes of a run enter it together.

  Process 0 claims the folder and tells the others the outcome.

  Args:
    workdir: local or gs://; made if needed.
    ours: a claim that this process already holds, which its owner releases.

  Yields:
    The claim, on a process that took one here.

  Raises:
    HeldError: another run holds it; raised on all processes.
    ConfigError: nothing can be written there; raised on all processes.
    OSError: the disk is full; the others get a ConfigError.
  """
  claim, error = None, None
  if ours is None and jax.process_index() == 0:
    try:
      claim = acquire(workdir, patience_seconds=2 * LEASE_SECONDS)
    except (HeldError, OSError) as failure:
      error = failure
      if isinstance(failure, OSError) and not files.is_disk_full(failure):
        cause = failure.strerror or failure
        error = config_lib.ConfigError(
          f"--workdir: got {str(workdir)!r}, expected a folder that can be"
          f" written ({cause})"
        )
  refusal = _of_process_0(str(error) if error is not None else "")
  if error is not None:
    raise error
  if refusal:
    raise HeldError(refusal)
  try:
    yield claim
  finally:
    if claim is not None:
      claim.release()


def is_held(workdir: epath.PathLike) -> bool:
  """Whether a live process holds the folder."""
  workdir = epath.Path(workdir)
  if not files.is_remote(workdir) and not (workdir / LOCK).exists():
    return False
  if not _has_locks(workdir):
    holder = _read(workdir)
    return holder is not None and holder.is_alive()
  lock = _lock(workdir, fcntl.LOCK_SH, 0.0)
  if lock is None:
    return True
  lock.close()
  return False


def _has_locks(workdir: epath.Path) -> bool:
  """Whether its file system supports locks. Some network disks do not."""
  if files.is_remote(workdir):
    return False
  with open(workdir / LOCK, "a", encoding="utf-8") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
      return True
    except OSError as error:
      if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
      raise
  return True


def _lock(
  workdir: epath.Path, kind: int, patience_seconds: float
) -> IO[str] | None:
  """An open, locked file, or None if another process has the lock."""
  # Closed on exec, so that child processes do not keep the lock.
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


def _take_lease(
  workdir: epath.Path, holder: Holder, patience_seconds: float
) -> None:
  deadline = time.monotonic() + patience_seconds
  other = seen = _read(workdir)
  while other is not None and other.is_alive():
    if other != seen or time.monotonic() >= deadline:
      raise _held(workdir, other)
    time.sleep(min(HEARTBEAT_SECONDS, patience_seconds))
    other = _read(workdir)
  _write(workdir, holder)
  time.sleep(SETTLE_SECONDS)
  other = _read(workdir)
  if other is None or other.token != holder.token:
    raise _held(workdir, other)


def _held(workdir: epath.Path, holder: Holder | None = None) -> HeldError:
  holder = holder or _read(workdir)
  return HeldError(
    f"--workdir: {workdir} is in use by {holder or 'another process'};"
    " wait for it to end, stop it, or choose another --workdir"
  )


def _read(workdir: epath.Path) -> Holder | None:
  """Who holds or held the folder; None if the file does not say."""
  try:
    return Holder(**json.loads((workdir / LOCK).read_text()))
  except (FileNotFoundError, TypeError, ValueError):
    return None


def _write(workdir: epath.Path, holder: Holder) -> None:
  files.write(workdir / LOCK, json.dumps(dataclasses.asdict(holder)))


def _of_process_0(text: str) -> str:
  """Broadcasts a text from process 0 to all processes."""
  if jax.process_count() == 1:
    return text
  given = text.encode()[:_MESSAGE_BYTES]
  padded = np.zeros((_MESSAGE_BYTES,), np.uint8)
  padded[: len(given)] = np.frombuffer(given, np.uint8)
  padded = np.asarray(multihost_utils.broadcast_one_to_all(padded))
  return bytes(padded).rstrip(b"\0").decode(errors="replace")
