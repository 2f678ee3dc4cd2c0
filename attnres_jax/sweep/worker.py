# SPDX-License-Identifier: Apache-2.0
r"""Trains runs of a sweep's folder; the command that every launcher starts.

  python -m attnres_jax.sweep.worker --folder=gs://BUCKET/scaling

Without --run, it trains the open runs of the sweep one after another until none
is left. You can start any number of these, anywhere and repeatedly: a worker
skips a run that is done or that another live worker is training, and resumes
any other run from its last checkpoint. A run that fails does not end a worker
of one process; several end with status 1, to start again together.
--only=EXPRESSION takes the runs whose names match.

  python -m attnres_jax.sweep.worker --folder=runs/scaling --run=NAME

trains one run. SIGTERM, SIGINT, SIGHUP or SIGUSR1 makes a worker save and stop.
The exit status says whether to start it again, see `attnres_jax.common.exits`.
After an error, the run's folder holds error.txt: traceback, step, host and
attempt.

Configs of runs are in the folder.

For runs over several processes, start the same command once per process with
--distributed. On a pod, JAX finds the cluster by itself; elsewhere, describe it
as for `attnres_jax.main`. The first process chooses and claims runs for all.
"""

import argparse
from collections.abc import Sequence
import os
import sys

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax import sweep
from attnres_jax.common import command_line
from attnres_jax.common import exits
from attnres_jax.common import files
from attnres_jax.config import fields
from attnres_jax.train import signals


def command(
  folder: epath.PathLike, name: str = "", *flags: str, python: str = "python"
) -> list[str]:
  """The command for a run, or for all of a sweep, on any machine."""
  run = [f"--run={name}"] if name else []
  return [
    python, "-m", "attnres_jax.sweep.worker", f"--folder={folder}", *run, *flags
  ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  signals.outlive_outputs()
  options = make_parser().parse_args(argv)
  return command_line.run(_work, options)


def _work(options: argparse.Namespace) -> int:
  files.check_folder("--folder", options.folder)
  folder, expected = epath.Path(options.folder), "the folder of a sweep"
  is_known = files.is_remote(folder) or (folder / sweep.SWEEP).exists()
  if not options.run and not is_known:
    config_lib.fail_argument("--folder", options.folder, expected)
  # JAX, Orbax and Grain, which take seconds, after the flags.
  from attnres_jax.sweep import work

  work.keep_programs(options.folder)
  try:
    command_line.connect(options)
    if options.run is not None:
      result = work.run(options.folder, options.run, options.patience_seconds)
    else:
      result = work.run_all(
        options.folder, options.patience_seconds, options.only
      )
  except (OSError, RuntimeError) as error:
    # Such as a TPU that the process of an earlier attempt has not left yet.
    work.say_failure("", error)
    result = exits.of_error(error)
  if result == exits.Exit.AGAIN:
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit would wait for other processes, which may be dead, and
    # write buffered output to a disk that may be full.
    os._exit(result)
  return result


def make_parser() -> command_line.Parser:
  parser = command_line.Parser("python -m attnres_jax.sweep.worker", __doc__)
  parser.add_argument("--folder", required=True, help="of the sweep")
  parser.add_argument("--run", help="name of one run (default: all open ones)")
  parser.add_argument(
    "--only", default="", help="regular expression over names of runs"
  )
  command_line.add_cluster(parser)
  parser.add_argument(
    "--patience_seconds", type=fields.NotNegative, default=0.0,
    help="to wait for runs whose worker may be dead",
  )  # fmt: skip
  return parser


if __name__ == "__main__":
  sys.exit(main())
