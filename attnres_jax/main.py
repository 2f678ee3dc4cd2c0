# SPDX-License-Identifier: Apache-2.0
r"""Trains a model from the command line.

  python -m attnres_jax.main \
    --config=configs/lm.py:size=tiny,residual=block_attnres \
    --config.optim.peak_lr=1e-3 --workdir=runs/tiny

Rerun the same command to resume an interrupted run. A bad flag, field or file
stops it before anything is compiled, with one line on stderr. The exit status
says whether to try again (`attnres_jax.common.exits`): 0 done, 1 try again, 2
never again. 3 means diverged, 4 stopped by a signal.

On a pod, start the command on every host with `--distributed`; JAX finds the
cluster by itself. Elsewhere, describe the cluster:

  python -m attnres_jax.main ... --distributed \
    --coordinator_address=10.0.0.1:1234 --num_processes=2 --process_id=0
"""

import argparse
from collections.abc import Sequence
import os
import sys
import traceback
from typing import NoReturn

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import exits
from attnres_jax.common import files
from attnres_jax.config import errors
from attnres_jax.train import signals


def main(argv: Sequence[str] | None = None) -> int:
  """Checks the flags and trains; returns the exit status."""
  options = make_parser().parse_args(argv)
  signals.outlive_outputs()
  return command_line.run(_train, options)


def make_parser() -> command_line.Parser:
  parser = command_line.Parser("python -m attnres_jax.main", __doc__)
  add = parser.add_argument
  parser.add_config()
  add("--workdir", help="of the run, local, gs:// or s3://; created if needed")
  parser.add_plans()
  command_line.add_cluster(parser)
  return parser


def _train(options: argparse.Namespace) -> exits.Exit:
  command_line.needed(options.config).values()  # Each field by itself.
  if not options.workdir:
    raise config_lib.ConfigError("--workdir: missing, expected a folder")
  files.check_folder("--workdir", options.workdir)
  config = command_line.load_config(options.config)
  # Orbax and Grain, which take seconds, after all that can be wrong.
  from attnres_jax.train import account
  from attnres_jax.train import loop

  command_line.connect(options)
  try:
    summary = loop.train_and_evaluate(
      config,
      options.workdir,
      plans=options.plans,
    )
  except Exception as error:
    if options.distributed and _is_alone(error):
      _leave(error)
    raise
  if summary["status"] == "stopped":
    step = summary["step"]
    saved = " with a checkpoint" if step else ""
    print(f"stopped after step {step}{saved}; rerun the same command to resume")
  else:
    losses = [
      f", {name.replace('_', ' ')} {summary[name]:.4f}"
      for name in ("train_loss", "validation_loss")
      if summary.get(name) is not None
    ]
    print(f"finished at step {summary['step']}{''.join(losses)}")
  # Only process 0 knows; nor does a run that an older version finished.
  if "chip_hours" in summary:
    print(account.end_line(summary))
  stopped = summary["status"] == "stopped"
  return exits.Exit.STOPPED if stopped else exits.Exit.DONE


def _is_alone(error: Exception) -> bool:
  """Whether other processes may not have this error, and wait for this one."""
  from attnres_jax.common import processes

  if isinstance(error, exits.HeldError):
    return False
  # Such as a device that runs out of memory in a step.
  if exits.is_of_jax(error) or exits.of_error(error) == exits.Exit.AGAIN:
    return True
  return not processes.all_come("the run is refused")


def _leave(error: Exception) -> NoReturn:
  """Ends this process immediately, so that the others notice.

  A normal exit would wait for the other processes, which may be dead.
  """
  import jax

  errors.without_jax_notes(error)
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
  os._exit(exits.of_error(error))


if __name__ == "__main__":
  sys.exit(main())
