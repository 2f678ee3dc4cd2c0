# SPDX-License-Identifier: Apache-2.0
"""Saves checkpoints of a run, each reported once it is complete on disk."""

from collections.abc import Mapping
import contextlib
import json
import logging
import time
from typing import Any

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax.common import files
from attnres_jax.common import processes
from attnres_jax.common import trees
from attnres_jax.train import checksums
from attnres_jax.train import metrics as metrics_lib
from attnres_jax.train import orbax_io


class Saver:
  """Writes checkpoints of one run, one after the other; a context manager.

  Open it after `restore_latest`, because it deletes unfinished saves. However
  the context is left, a pending save is finished.

  Attributes:
    last_step: of the last save, finished or not; None if there is none.
  """

  def __init__(
    self,
    workdir: epath.PathLike,
    config: config_lib.CheckpointConfig,
    writer: metrics_lib.Writer | None = None,
    parameters: int = 0,
  ):
    """For the run in a folder, whose `writer` gets an event for each save."""
    self._asynchronous, self._writer = config.asynchronous, writer
    # A failed save is raised here, so its tracebacks in the log are noise.
    logging.getLogger("absl").addFilter(orbax_io.is_not_orbax)
    self._folder = orbax_io.checkpoints(workdir)
    # Orbax's 20 minutes, and four hours for 48B parameters, of which process 0
    # reads 600 GB back for checksums. If a save fails in one process, that and
    # the others wait for each other so long.
    seconds = 1200 + parameters // 4_000_000
    self._checkpointer = orbax_io.checkpointer(
      self._folder, config, seconds, lambda: self._write_checksums()
    )
    latest = self._checkpointer.latest
    self.last_step = None if latest is None else latest.step
    self._under_way: Any = None
    self._pending: tuple[int, float] | None = None
    self._info: dict[str, Any] = {}
    self._last_bytes = 0
    if latest is not None and processes.is_first():
      self._last_bytes = checksums.num_bytes(self._folder / str(latest.step))

  def __enter__(self) -> "Saver":
    return self

  def __exit__(self, *unused) -> None:
    with contextlib.ExitStack() as stack:
      absl_logger = logging.getLogger("absl")
      stack.callback(absl_logger.removeFilter, orbax_io.is_not_orbax)
      stack.enter_context(self._explaining())
      stack.callback(self._checkpointer.close)
      self.wait()

  def save(self, step: int, state: Any, info: Mapping[str, Any]) -> None:
    """Starts a save, after the previous one; nothing if it was of this step.

    Arrays are copied before this returns, so the state may be donated. If a
    save fails in the background, the next call (or `wait`) raises. `info` is a
    JSON object.

    Raises:
      DiskFullError: there is less room than the last save took.
    """
    if step == self.last_step:
      return
    self.wait()
    if self._writer:
      self._writer.flush()
    start = time.perf_counter()
    files.check_space(self._folder / str(step), self._last_bytes)
    self.last_step = step
    self._info = json.loads(json.dumps(dict(info)))
    with self._explaining():
      self._under_way = self._checkpointer.save_checkpointables_async(
        step,
        orbax_io.split(trees.to_flat(state)),
        custom_metadata=self._info,
        force=True,
      )
    self._pending = step, time.perf_counter() - start
    if not self._asynchronous:
      self.wait()

  def wait(self) -> None:
    """Waits until the pending save, if any, is complete on disk."""
    start = time.perf_counter()
    under_way, self._under_way = self._under_way, None
    with self._explaining():
      if under_way is not None:
        # The thread that waits for a save, and its event loop, end only here.
        under_way.result()
      self._checkpointer.wait()
    pending, self._pending = self._pending, None
    if pending and self._writer:
      seconds = pending[1] + time.perf_counter() - start
      self._writer.event(pending[0], "checkpoint", blocked_seconds=seconds)

  def newest(self) -> str:
    """The newest checkpoint in words, after the pending save."""
    self.wait()
    steps = orbax_io.all_steps(self._folder.parent)
    return f"step {steps[-1]} in {self._folder}" if steps else "none yet"

  def _write_checksums(self) -> None:
    # A temporary folder on disks; object stores have the final one.
    final = self._folder / str(self.last_step)
    names = sorted(f.name for f in self._folder.iterdir())
    begins = (name for name in names if name.startswith(f"{final.name}."))
    folder = self._folder / next(begins, final.name)
    checksums.write(folder, self._info)
    self._last_bytes = checksums.num_bytes(folder)

  def _explaining(self) -> contextlib.AbstractContextManager[None]:
    return files.explaining_full_disk(
      self._folder / str(self.last_step), self._last_bytes or None
    )
