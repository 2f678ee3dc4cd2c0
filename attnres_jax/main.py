# SPDX-License-Identifier: Apache-2.0
"""Trains a model from the command line.

  python -m attnres_jax.main \
    --config=configs/lm.py:size=tiny,residual=block_attnres \
    --config.optim.peak_lr=1e-3 --workdir=runs/tiny

Rerun the same command to resume an interrupted run. A bad flag, field or file
stops it before anything is compiled, with one line on stderr and exit status 2;
a run that fails exits with 1.

On a pod, start the command on every host with `--distributed`; JAX finds the
cluster by itself. Elsewhere, describe the cluster:

  python -m attnres_jax.main ... --distributed \
    --coordinator_address=10.0.0.1:1234 --num_processes=2 --process_id=0
"""

from collections.abc import Sequence
import os
import sys
import traceback
from typing import NoReturn

from absl import app
from absl import flags
import jax

from attnres_jax import command_line
from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax import files
from attnres_jax import train

_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Folder of the run, local or gs://; created if needed."
)
_CHANGED = flags.DEFINE_bool(
    "resume_with_changed_config", False,
    "Resume a run even if its configuration or data differ.",
)  # fmt: skip
_ANY_SIZE = flags.DEFINE_bool(
    "any_size", False,
    "Train even if the model seems too large for this machine.",
)  # fmt: skip
_DISTRIBUTED = flags.DEFINE_bool(
  "distributed", False, "This is one of several processes of one run."
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator_address", None, "host:port of process 0; automatic on a pod."
)
_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes", None, "Number of processes; automatic on a pod."
)
_PROCESS_ID = flags.DEFINE_integer(
  "process_id", None, "Index of this process, from 0; automatic on a pod."
)


def main(argv: Sequence[str]) -> int:
  """Checks the flags and trains; returns the exit status."""
  del argv
  return command_line.run(_train)


def _train() -> None:
  config = command_line.config_of_flags()
  if not _WORKDIR.value:
    raise config_lib.ConfigError("--workdir: missing, expected a folder")
  files.check_folder("--workdir", _WORKDIR.value)
  data.check(config)
  command_line.connect(
    _DISTRIBUTED.value,
    _COORDINATOR.value,
    _NUM_PROCESSES.value,
    _PROCESS_ID.value,
  )
  try:
    summary = train.train_and_evaluate(
      config,
      _WORKDIR.value,
      resume_with_changed_config=_CHANGED.value,
      any_size=_ANY_SIZE.value,
      leave=_leave_early,
      plans=command_line.plans_file(),
    )
  except jax.errors.JaxRuntimeError as error:
    if not _DISTRIBUTED.value:
      raise
    _leave(error)
  if summary["status"] == "stopped":
    _say_stopped(summary["step"])
  else:
    losses = [
      f", {name.replace('_', ' ')} {summary[name]:.4f}"
      for name in ("train_loss", "validation_loss")
      if summary.get(name) is not None
    ]
    print(f"finished at step {summary['step']}{''.join(losses)}")


def _say_stopped(step: int) -> None:
  saved = " with a checkpoint" if step else ""
  print(f"stopped after step {step}{saved}; rerun the same command to resume")


def _leave_early(step: int) -> NoReturn:
  """Ends this process even while its main thread is compiling."""
  _say_stopped(step)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(0)


def _leave(error: Exception) -> NoReturn:
  """Ends this process immediately, so that the others notice.

  A normal exit would wait for the other processes, which may be dead.
  """
  traceback.print_exc()
  reason = str(error).strip().partition("\n")[0]
  print(
    f"error: process {jax.process_index()} ends, since a step failed here or"
    f" another process is gone ({reason}); rerun the same command to resume"
    " from the last checkpoint",
    file=sys.stderr,
  )
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(1)


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
