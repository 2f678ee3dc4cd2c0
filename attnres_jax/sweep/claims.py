# SPDX-License-Identifier: Apache-2.0
"""Claims a run of a sweep for a worker and keeps its state file up to date.

The claim itself is that of `attnres_jax.claims`.
"""

import dataclasses
import time

from etils import epath

from attnres_jax import claims
from attnres_jax import config as config_lib
from attnres_jax.sweep import exits
from attnres_jax.sweep import state as state_lib

is_held = claims.is_held


def acquire(workdir: epath.PathLike) -> "Claim | None":
  """Claims a run; None if it is done or another worker has claimed it.

  Raises:
    ConfigError: the state of the run is damaged.
  """
  workdir = epath.Path(workdir)
  try:
    claim = claims.acquire(workdir, lost_status=exits.Exit.BUSY)
  except claims.HeldError:
    return None
  try:
    old = state_lib.read(workdir)
    if old.status == state_lib.DAMAGED:
      raise config_lib.ConfigError(old.error)
    if old.status != state_lib.DONE:
      return Claim(workdir, claim, old)
  except BaseException:
    claim.release()
    raise
  claim.release()
  return None


class Claim:
  """A run that this process holds; it updates the state until it is released.

  Attributes:
    claim: of the run's folder, for the training code.
  """

  def __init__(
    self, workdir: epath.Path, claim: claims.Claim, old: state_lib.State
  ):
    self.claim = claim
    self._workdir = workdir
    self._earlier_seconds = old.seconds
    self._state = dataclasses.replace(
      old,
      status=state_lib.RUNNING,
      attempts=old.attempts + 1,
      host=claim.holder.host,
      pid=claim.holder.pid,
      token=claim.holder.token,
      started=claim.holder.started,
      heartbeat=claim.holder.started,
      error="",
    )
    state_lib.write(workdir, self._state)
    claim.on_beat = self._write

  def release(self, status: str, error: str = "") -> None:
    """Writes the outcome and releases the claim."""

    def last() -> None:
      self._state = dataclasses.replace(self._state, status=status, error=error)
      self._write()

    self.claim.release(last)

  def _write(self) -> None:
    now = time.time()
    seconds = self._earlier_seconds + now - self._state.started
    self._state = dataclasses.replace(
      self._state, heartbeat=now, seconds=seconds
    )
    state_lib.write(self._workdir, self._state)
