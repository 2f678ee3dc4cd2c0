# SPDX-License-Identifier: Apache-2.0
"""Exit statuses of a worker, which tell launchers how it ended."""

import enum


class Exit(enum.IntEnum):
  """How a worker ended.

  Attributes:
    DONE: the run is finished, by this worker or before it.
    FAILED: with an error, which is in the state file; other runs continue.
    UNUSABLE: the command is invalid, such as for a run that does not exist.
    BUSY: another live worker is training the run.
    STOPPED: by a signal, with a checkpoint; rerun the same command to resume.
    DISK_FULL: nothing can be written, so other runs would fail soon as well.
  """

  DONE = 0
  FAILED = 1
  UNUSABLE = 2
  BUSY = 3
  STOPPED = 4
  DISK_FULL = 5
