# SPDX-License-Identifier: Apache-2.0
"""Exit statuses of a worker, by which launchers know how it ended."""

import enum


class Exit(enum.IntEnum):
  """How a worker ended.

  Attributes:
    DONE: the run is finished, by this worker or before it.
    FAILED: with an error, which is in the state file; others may go on.
    UNUSABLE: the command makes no sense, such as a run that does not exist.
    BUSY: a living worker has the run.
    STOPPED: by a signal, with a checkpoint; the same command goes on.
    DISK_FULL: nothing can be written; other runs will not get far either.
  """

  DONE = 0
  FAILED = 1
  UNUSABLE = 2
  BUSY = 3
  STOPPED = 4
  DISK_FULL = 5
