# SPDX-License-Identifier: Apache-2.0
"""A sweep as one array of SLURM jobs, for clusters of GPUs.

Nothing is sent anywhere: the script lands in a file, and

  sbatch SCRIPT

hands it to the cluster. Each job of the array trains one run, with a process
per GPU; `srun` starts them, and JAX connects them by SLURM's variables. Before
the time of a job is over its run saves and stops, and the job queues up again;
so does one that is preempted or loses a node. A failed run is tried again by
the next launch.
"""

from collections.abc import Mapping, Sequence
import os
import pathlib
import re
import shlex

from etils import epath

from attnres_jax import claims
from attnres_jax import files
from attnres_jax.scaling import grid
from attnres_jax.sweep import exits
from attnres_jax.sweep import launchers
from attnres_jax.sweep import worker
from attnres_jax.sweep.launchers import settings as settings_lib

SETTINGS = {
  "nodes": "of a run (1)",
  "gpus": "of each node that a run takes (1)",
  "time": "limit of a job, as SLURM writes it; runs go on after it (24:00:00)",
  "partition": "of the cluster (its default)",
  "account": "of the cluster (your default)",
  "setup": "shell command before the workers, such as one for an environment",
  "script": "file to write (sweep.sbatch)",
}

# A worker that is told to stop finishes a step and saves a checkpoint.
_GRACE_SECONDS = 300


def launch(
  runs: Sequence[grid.Run],
  folder: epath.PathLike,
  options: launchers.Options,
) -> int:
  """Writes the script for all runs that are not done; 0.

  Raises:
    ConfigError: a setting cannot be used.
  """
  names = [run.name for run in launchers.todo(runs, folder)]
  if not names:
    print("no run is left to train")
    return 0
  # Jobs start where they were sent from.
  folder = str(folder) if files.is_remote(folder) else os.path.abspath(folder)
  text = script(names, folder, options)
  if options.dry_run:
    print(text, end="")
    return 0
  target = pathlib.Path(options.settings.get("script", "sweep.sbatch"))
  target.parent.mkdir(parents=True, exist_ok=True)
  files.write(target, text)
  print(f"{len(names)} runs in {target}\n  sbatch {target}")
  return 0


def script(
  names: Sequence[str], folder: str, options: launchers.Options
) -> str:
  """The array of jobs that trains runs, by their names.

  Raises:
    ConfigError: a setting cannot be used.
  """
  given = options.settings
  gpus = settings_lib.number(given, "gpus", 1)
  last = len(names) - 1
  # Of a run in a bucket only SLURM's own words are kept here.
  logs = "." if files.is_remote(folder) else folder
  directives = {
    "job-name": "attnres",
    "array": f"0-{last}%{options.max_parallel}",
    "nodes": settings_lib.number(given, "nodes", 1),
    "ntasks-per-node": gpus,
    "gpus-per-node": gpus,
    "time": _time(given),
    "signal": f"TERM@{_GRACE_SECONDS}",
    "output": f"{logs}/slurm-%a.txt",
    "open-mode": "append",
    "partition": given.get("partition"),
    "account": given.get("account"),
  }
  lines = ["#!/bin/bash"]
  lines += [f"#SBATCH --{k}={v}" for k, v in directives.items() if v]
  lines += ["#SBATCH --requeue", ""]
  lines += [f"runs=({shlex.join(names)})"]
  if given.get("setup"):
    lines.append(given["setup"])
  patience = f"--patience_seconds={2 * claims.LEASE_SECONDS:.0f}"
  command = worker.command(folder, "RUN", "--distributed", patience)
  words = [shlex.quote(word) for word in command]
  words[command.index("--run=RUN")] = '--run="${runs[$SLURM_ARRAY_TASK_ID]}"'
  lines += [
    f"srun --kill-on-bad-exit=1 {' '.join(words)}",
    "status=$?",
    f"if [ $status = {int(exits.Exit.STOPPED)} ]; then",
    '  scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"',
    "fi",
    "exit $status",
  ]
  return "\n".join(lines) + "\n"


def _time(given: Mapping[str, str]) -> str:
  time = given.get("time", "24:00:00")
  if not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", time):
    settings_lib.fail("time", time, "minutes, HH:MM:SS or DAYS-HH:MM:SS")
  return time
