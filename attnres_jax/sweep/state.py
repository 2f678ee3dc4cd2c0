# SPDX-License-Identifier: Apache-2.0
"""The state of a run of a sweep, a small file in its workdir.

  pending   no worker has begun
  running   a worker is training it; its heartbeat says whether it is alive
  stopped   by a signal, with a checkpoint
  failed    with an error that another attempt may not meet; it is tried again
  refused   its config, plan, data or program has to change
  diverged  a loss or gradient was not finite
  done      finished; nothing runs it again
  damaged   the file cannot be read; nothing runs it until the file is removed

A worker that was killed leaves `running` and a heartbeat that has stopped;
`status` calls that interrupted.
"""

from collections.abc import Callable
import dataclasses
import time
from typing import Annotated

from etils import epath
import jax

from attnres_jax import config as config_lib
from attnres_jax.common import exits
from attnres_jax.common import records
from attnres_jax.config import fields
from attnres_jax.sweep import damage
from attnres_jax.train import account
from attnres_jax.train import claims

PENDING, RUNNING, STOPPED = "pending", "running", "stopped"
FAILED, REFUSED, DIVERGED = "failed", "refused", "diverged"
DONE, DAMAGED = "done", "damaged"
STATUSES = (
  PENDING, RUNNING, STOPPED, FAILED, REFUSED, DIVERGED, DONE, DAMAGED,
)  # fmt: skip
_Status = Annotated[
  str, fields.Accepted(lambda word: word in STATUSES, " or ".join(STATUSES))
]
# Workers without a name of a run take these.
OPEN = (PENDING, RUNNING, STOPPED, FAILED)
BAD = (FAILED, REFUSED, DIVERGED, DAMAGED)
OF_EXIT = {
  exits.Exit.DONE: DONE,
  exits.Exit.AGAIN: FAILED,
  exits.Exit.NEVER: REFUSED,
  exits.Exit.DIVERGED: DIVERGED,
  exits.Exit.STOPPED: STOPPED,
}

FILE = "state.json"


@dataclasses.dataclass(frozen=True)
class State(records.Record):
  """The state of one run.

  Attributes:
    status: see the module.
    attempts: number of workers that have claimed the run.
    host: of the last worker.
    pid: its process.
    token: distinguishes it from all others.
    started: when it began, seconds since the epoch.
    heartbeat: when it was last seen, in the same unit.
    seconds: duration of all attempts, up to the heartbeat.
    chip_seconds: the same, each attempt times its chips; 0 in old files. More
      than in summary.json, which adds up rows: a worker also holds its chips
      before the first row and after the last.
    error: of the last attempt, one line.
  """

  status: _Status = PENDING
  attempts: int = 0
  host: str = ""
  pid: int = 0
  token: str = ""
  started: float = 0.0
  heartbeat: float = 0.0
  seconds: float = 0.0
  chip_seconds: float = 0.0
  error: str = ""


def read(workdir: epath.PathLike) -> State:
  """The state of a run: `pending` if there is no file.

  An unreadable file gives the state `damaged`, and `error` says where. So one
  bad file of a sweep affects the state of one run only.

  Raises:
    OSError: a store cannot be reached, which is no damage.
  """
  path = epath.Path(workdir) / FILE
  try:
    return damage.read(path, State)
  except FileNotFoundError:
    return State()
  except damage.DamagedError as error:
    return State(
      DAMAGED, error=f"{error}; remove this file to start the run again"
    )


def write(workdir: epath.PathLike, state: State) -> None:
  records.write(epath.Path(workdir) / FILE, state)


class Attempt:
  """A run that this process holds; keeps its state up to date until it ends.

  Attempts are numbered from 1. The claim of the run's folder is for the
  training code.
  """

  def __init__(
    self,
    workdir: epath.Path,
    claim: claims.Claim,
    old: State,
    spent: Callable[[], float] | None = None,
  ):
    self.claim = claim
    self._spent = spent or (lambda: time.time() - self._state.started)
    self.number = old.attempts + 1
    self._workdir = workdir
    self._earlier = old
    # Who counts the seconds of a device, as one that runs share, uses one.
    self._chips = account.num_chips(jax.devices()[: 1 if spent else None])
    self._state = dataclasses.replace(
      old,
      status=RUNNING,
      attempts=self.number,
      host=claim.holder.host,
      pid=claim.holder.pid,
      token=claim.holder.token,
      started=claim.holder.started,
      heartbeat=claim.holder.started,
      error="",
    )
    write(workdir, self._state)
    claim.on_beat = self._write

  @property
  def chip_hours(self) -> float:
    """Chip-hours of all attempts until now."""
    spent = self._spent() * self._chips
    return (self._earlier.chip_seconds + spent) / 3600

  def end(self, status: str, error: str = "") -> None:
    """Writes the outcome and releases the claim."""

    def last() -> None:
      self._state = dataclasses.replace(self._state, status=status, error=error)
      self._write()

    self.claim.release(last)

  def _write(self) -> None:
    now = time.time()
    self._state = dataclasses.replace(
      self._state,
      heartbeat=now,
      seconds=self._earlier.seconds + self._spent(),
      chip_seconds=self.chip_hours * 3600,
    )
    write(self._workdir, self._state)


def begin(
  workdir: epath.PathLike, spent: Callable[[], float] | None = None
) -> Attempt | None:
  """Claims a run; None if it is done or another process holds it.

  `spent` gives seconds of one device that the attempt has used; by default all
  since its start, of all devices.

  Raises:
    ConfigError: the state of the run is damaged.
  """
  workdir = epath.Path(workdir)
  try:
    claim = claims.acquire(workdir)
  except claims.HeldError:
    return None
  try:
    old = read(workdir)
    if old.status == DAMAGED:
      raise config_lib.ConfigError(old.error)
    if old.status != DONE:
      return Attempt(workdir, claim, old, spent)
  except BaseException:
    claim.release()
    raise
  claim.release()
  return None
