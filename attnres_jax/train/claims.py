# SPDX-License-Identifier: Apache-2.0
"""At most one writer per run folder, however it is started and dies.

On a disk, a writer holds a kernel lock (flock) on the file `lock` as long as it
lives; however it dies, the lock is released. This works on local disks and on
network disks whose server supports locks.

Object stores have no locks, but they create an object only if there is none. So
there, a claim is a numbered lease: the writer creates `lock.N`, with N above
all others, and one of several writers that try the same N succeeds. Whoever has
the highest number holds the folder until it has released it, or somebody who
waits has seen no new heartbeat for `LEASE_SECONDS` by its own clock: clocks of
other hosts do not count. The highest lease is never removed,
so a number is never used twice. A writer whose own lease is missing, or has a
higher one above it, has lost the folder and ends immediately. A write confirms
the lease first if the last confirmation is older than half its length, so a
process that was stopped for longer begins no write. (A request that it had
begun may still arrive; state and summary of a finished run survive that.)
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
from typing import IO
import uuid

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax.common import exits
from attnres_jax.common import files
from attnres_jax.common import processes
from attnres_jax.common import records
from attnres_jax.common import stores

HeldError = exits.HeldError
LOCK = "lock"
# Other processes hold a lock briefly to look at it; wait until they are done.
PATIENCE_SECONDS = 1.0
HEARTBEAT_SECONDS = 10.0
# A writer without a heartbeat for this long is considered dead.
LEASE_SECONDS = 90.0


@dataclasses.dataclass(frozen=True)
class Holder(records.Record):
  """The holder of a folder.

  Attributes:
    host: where the process runs.
    pid: its process id there.
    token: distinguishes it from all other holders.
    started: when it claimed the folder, seconds since the epoch.
    heartbeat: when it was last seen, in the same unit; 0 once it has released
      the folder. Updated in object stores only.
  """

  host: str
  pid: int
  token: str
  started: float
  heartbeat: float

  def seems_alive(self) -> bool:
    """Whether its last heartbeat was recent, if both clocks are right."""
    return abs(time.time() - self.heartbeat) < LEASE_SECONDS

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
    self, workdir: epath.Path, holder: Holder, lock: "IO[str] | int"
  ):
    self.holder = holder
    self.on_beat: Callable[[], None] | None = None
    self._workdir = workdir
    self._lock = lock
    # When its heartbeat was stamped: the store may have taken long to keep it.
    self._confirmed = holder.heartbeat
    self._over = threading.Event()
    self._thread = threading.Thread(
      target=self._beat, name="heartbeat", daemon=True
    )
    if isinstance(lock, int):
      stores.guard(workdir, self.confirm)
    self._thread.start()

  def release(self, last: Callable[[], None] = lambda: None) -> None:
    """Stops the heartbeat, calls `last`, and releases the folder."""
    self._over.set()
    self._thread.join()
    try:
      last()
    finally:
      if isinstance(self._lock, int):
        self.confirm()
        stores.guard(self._workdir, None)
        self._write_lease(0.0)
      else:
        self._lock.close()

  def confirm(self) -> None:
    """Ends this process if it may have lost its lease, and has.

    Raises:
      OSError: the store does not say.
    """
    if time.time() - self._confirmed > LEASE_SECONDS / 2:
      self._confirm_now()

  def _confirm_now(self) -> None:
    before = time.time()
    if max(_leases(self._workdir), default=-1) != self._lock:
      print(
        f"error: {self._workdir}: another process has taken this run",
        file=sys.stderr,
        flush=True,
      )
      # Anything written from here on could undo the other process's work.
      os._exit(exits.Exit.AGAIN)
    self._confirmed = before

  def _beat(self) -> None:
    while not self._over.wait(HEARTBEAT_SECONDS):
      # A full disk or a lost network ends the run when it writes results.
      with contextlib.suppress(OSError, config_lib.ConfigError):
        if isinstance(self._lock, int):
          self._confirm_now()
          self._write_lease(time.time())
        if self.on_beat is not None:
          self.on_beat()

  def _write_lease(self, heartbeat: float) -> None:
    assert isinstance(self._lock, int)
    self.holder = dataclasses.replace(self.holder, heartbeat=heartbeat)
    stores.write(_lease(self._workdir, self._lock), _bytes(self.holder))


def acquire(workdir: epath.PathLike, *, patience_seconds: float = 0.0) -> Claim:
  """Claims a folder, local or in an object store; it is created if needed.

  It waits for a lease whose holder may be dead; at least `LEASE_SECONDS` if its
  clock says so. Waiting ends early if the holder turns out to be alive.

  Raises:
    HeldError: another process holds it; names the process.
    OSError: nothing can be written there.
  """
  workdir = epath.Path(workdir)
  now = time.time()
  holder = Holder(socket.gethostname(), os.getpid(), uuid.uuid4().hex, now, now)
  if not files.is_remote(workdir):
    workdir.mkdir(parents=True, exist_ok=True)
  try:
    lock = _lock(workdir, fcntl.LOCK_EX, PATIENCE_SECONDS)
  except _NoLocksError:
    number, holder = _take_lease(workdir, holder, patience_seconds)
    return Claim(workdir, holder, number)
  if lock is None:
    raise _held(workdir, _read(workdir / LOCK))
  start = _bytes(holder)[: len('{"host"')]
  if not start.startswith(files.read(workdir / LOCK)[: len(start)]):
    lock.close()
    files.fail_foreign("--workdir", workdir, LOCK)
  # Locks work on a full disk too, but their owner is then not named.
  with contextlib.suppress(OSError):
    os.ftruncate(lock.fileno(), 0)
    os.write(lock.fileno(), _bytes(holder))
  return Claim(workdir, holder, lock)


@contextlib.contextmanager
def held(
  workdir: epath.PathLike, ours: Claim | None = None
) -> Iterator[Claim | None]:
  """A context for work in a folder; all processes of a run enter it together.

  Process 0 claims the folder and tells the others the outcome. It may hold the
  claim already, which its owner releases.

  Yields:
    The claim, on a process that took one here.

  Raises:
    HeldError: another run holds it; raised on all processes.
    OSError: nothing can be written there; the others get a HeldError.
  """
  claim, error, workdir = None, None, epath.Path(workdir)
  is_new = not files.is_remote(workdir) and not workdir.exists()
  if ours is None and processes.is_first():
    try:
      claim = acquire(workdir, patience_seconds=2 * LEASE_SECONDS)
    except (config_lib.ConfigError, OSError) as failure:
      error = failure
  refusal = processes.text_of_first(str(error) if error is not None else "")
  if error is not None:
    raise error
  if refusal:
    raise HeldError(refusal)
  try:
    yield claim
  finally:
    if claim is not None:
      if is_new and os.listdir(workdir) == [LOCK]:  # The start was refused.
        shutil.rmtree(workdir)
      claim.release()


def is_held(workdir: epath.PathLike) -> bool:
  """Whether a live process holds the folder; by its clock in object stores.

  Only whoever waits for the folder, in `acquire`, can tell for certain.
  """
  workdir = epath.Path(workdir)
  if not files.is_remote(workdir) and not (workdir / LOCK).exists():
    return False
  try:
    lock = _lock(workdir, fcntl.LOCK_SH, 0.0)
  except _NoLocksError:
    newest = _newest(workdir)[1]
    return newest is not None and newest.seems_alive()
  if lock is None:
    return True
  lock.close()
  return False


class _NoLocksError(Exception):
  """An object store, or a file system such as some network disks."""


def _lock(
  workdir: epath.Path, kind: int, patience_seconds: float
) -> IO[str] | None:
  """An open, locked file, or None if another process has the lock.

  Raises:
    _NoLocksError: the file system has no locks.
  """
  if files.is_remote(workdir):
    raise _NoLocksError
  # Closed on exec, so that child processes do not keep the lock. NFS shares a
  # lock only of a file that is open for reading.
  try:
    file = open(workdir / LOCK, "a+", encoding="utf-8")
  except PermissionError:
    if kind != fcntl.LOCK_SH:
      raise
    file = open(workdir / LOCK, encoding="utf-8")  # Of another user.
  deadline = time.monotonic() + patience_seconds
  while True:
    try:
      fcntl.flock(file, kind | fcntl.LOCK_NB)
      if os.fstat(file.fileno()).st_nlink:
        return file
      file.close()  # A refused start has removed it with its folder.
      return None
    except BlockingIOError:
      if time.monotonic() >= deadline:
        file.close()
        return None
      time.sleep(0.05)
    except BaseException as error:
      file.close()
      no_locks = errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP
      if getattr(error, "errno", None) in no_locks:
        raise _NoLocksError from error
      raise


def _take_lease(
  workdir: epath.Path, holder: Holder, patience_seconds: float
) -> tuple[int, Holder]:
  """Creates the lease above all others; its number, and the holder in it."""
  number, other = first = _newest(workdir)
  since = time.monotonic()
  if other is not None and not other.seems_alive():
    patience_seconds = max(patience_seconds, LEASE_SECONDS)
  while other is not None and other.heartbeat:
    waited = time.monotonic() - since
    if (number, other) != first:
      raise _held(workdir, other)
    if waited >= LEASE_SECONDS:
      break
    if waited >= patience_seconds:
      raise _held(workdir, other)
    left = min(LEASE_SECONDS, patience_seconds) - waited
    time.sleep(min(HEARTBEAT_SECONDS, left))
    number, other = _newest(workdir)
  number += 1
  # After a wait, so that the first heartbeat of others is not in the past.
  holder = dataclasses.replace(holder, heartbeat=time.time())
  if not stores.create(_lease(workdir, number), _bytes(holder)):
    raise _held(workdir, _read(_lease(workdir, number)))
  # A process that looked long ago may have created a number that was in use
  # and removed since.
  numbers = _leases(workdir)
  if max(numbers, default=-1) != number:
    raise _held(workdir, _newest(workdir)[1])
  for old in numbers:
    if old < number:
      stores.remove(_lease(workdir, old))
  return number, holder


def _leases(workdir: epath.Path) -> list[int]:
  """Numbers of all leases of a folder."""
  matches = [re.fullmatch(rf"{LOCK}\.(\d+)", n) for n in stores.names(workdir)]
  return [int(match[1]) for match in matches if match]


def _newest(workdir: epath.Path) -> tuple[int, Holder | None]:
  number = max(_leases(workdir), default=-1)
  return number, _read(_lease(workdir, number)) if number >= 0 else None


def _lease(workdir: epath.Path, number: int) -> epath.Path:
  return workdir / f"{LOCK}.{number}"


def _held(workdir: epath.Path, holder: Holder | None) -> HeldError:
  return HeldError(
    f"--workdir: {workdir} is in use by {holder or 'another process'};"
    " wait for it to end, stop it, or choose another --workdir"
  )


def _read(path: epath.Path) -> Holder | None:
  """Who holds or held the folder; None if the file does not say."""
  try:
    content = stores.read(path)
  except FileNotFoundError:
    return None
  with contextlib.suppress(config_lib.ConfigError):
    return config_lib.from_json(content, path, Holder.of_values)
  return None


def _bytes(holder: Holder) -> bytes:
  return json.dumps(config_lib.to_dict(holder)).encode()
