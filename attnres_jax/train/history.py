# SPDX-License-Identifier: Apache-2.0
"""What earlier attempts have left in the folder of a run, and what it lacks."""

import dataclasses
import platform
import time
from typing import Any

from etils import epath
import jax

from attnres_jax.common import environment
from attnres_jax.train import checkpoint
from attnres_jax.train import goodput
from attnres_jax.train import metrics as metrics_lib
from attnres_jax.train import train_state

Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class History:
  """The folder of a run when an attempt begins.

  Attributes:
    restored: the newest checkpoint that can be read; None at the first attempt.
    rows: of earlier attempts.
    missing: step of a newer checkpoint that was completed, or None.
  """

  restored: checkpoint.Restored | None
  rows: Rows
  missing: int | None

  @property
  def step(self) -> int:
    """Steps that need not be repeated."""
    return self.restored.step if self.restored else 0

  def report(
    self, writer: metrics_lib.Writer, program: train_state.Program
  ) -> None:
    """Writes an event for everything that is not as it should be.

    And the first event of an attempt: the work lost, what runs, and where.
    """
    step, restored = self.step, self.restored
    for broken, cause in (restored.unreadable if restored else {}).items():
      writer.event(step, "checkpoint set aside", of_step=broken, cause=cause)
    if self.missing is not None:
      writer.event(step, "checkpoint missing", of_step=self.missing)
    lost_steps, lost_seconds = goodput.lost(self.rows, step)
    form = program.abstract_state.model.residual.form
    reads = {"depth_reads": form} if form else {}
    writer.event(
      step,
      "resume" if restored else "start",
      lost_steps=lost_steps,
      lost_seconds=lost_seconds,
      devices=program.mesh.size,
      device_kind=program.mesh.devices.flat[0].device_kind,
      processes=jax.process_count(),
      hardware=environment.hardware(),
      commit=environment.commit(),
      jax=jax.__version__,
      python=platform.python_version(),
      time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
      **reads,
    )


def missing_checkpoint(
  workdir: epath.Path,
  restored: checkpoint.Restored | None,
  rows: Rows,
) -> int | None:
  """The step of a newer checkpoint that was completed but is missing.

  Raises:
    CheckpointError: some were completed, but none is left.
  """
  completed: set[int] = set()
  for row in rows:
    if row.get("event") == "checkpoint":
      completed.add(row["step"])
    elif row.get("event") in ("checkpoint set aside", "checkpoint missing"):
      completed.discard(row["of_step"])
  if not completed:
    return None
  newest = max(completed)
  if restored is None:
    raise checkpoint.CheckpointError(
      f"checkpoints of {workdir} up to step {newest} were completed, and all"
      " are gone; to start again, choose another --workdir or empty this one"
    )
  is_there = newest <= restored.step or newest in restored.unreadable
  return None if is_there else newest
