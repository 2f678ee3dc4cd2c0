# SPDX-License-Identifier: Apache-2.0
"""A sweep as one array of SLURM jobs, for clusters of GPUs.

This launcher only writes a script;

  sbatch SCRIPT

submits it to the cluster. Each job of the array trains one run, with a process
per GPU; `srun` starts them, and JAX connects them by SLURM's variables. Before
the time limit of a job, its run saves and stops, and the job is queued again.
So is a job that is preempted or loses a node and, up to `max_restarts` times,
one whose process is killed or meets an error that another attempt may not meet.
A run that diverged or was refused is not.
"""

from collections.abc import Sequence
import re
import shlex
import types

from attnres_jax import config as config_lib
from attnres_jax.common import exits
from attnres_jax.common import files
from attnres_jax.scaling import grid
from attnres_jax.sweep import launchers
from attnres_jax.sweep import worker
from attnres_jax.sweep.launchers import settings as settings_lib

Setting = settings_lib.Setting
SETTINGS = {
  "nodes": Setting("nodes per run", 1, int),
  "gpus": Setting("GPUs per node; a run uses all of them", 1, int),
  "time": Setting(
    "time limit of a job; runs resume in the next one", "24:00:00"
  ),
  "partition": Setting("partition (default: that of the cluster)"),
  "account": Setting("account (default: yours)"),
  "setup": Setting(
    "shell command to run first, such as to activate an environment"
  ),
  "max_restarts": Setting(
    "restarts per run after errors; time limits do not count", 3, int, least=0
  ),
  "script": Setting("file to write", "sweep.sbatch"),
}

# A worker that is stopped finishes its step and saves a checkpoint.
_GRACE_SECONDS = 300


def plan(
  runs: Sequence[grid.Run], folder: str, settings: types.SimpleNamespace
) -> launchers.Launch:
  """The script of an array of jobs, and how to submit it."""
  if not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", settings.time):
    accepted = "minutes, HH:MM:SS or DAYS-HH:MM:SS"
    settings_lib.fail("time", settings.time, accepted)
  given, names = settings, [run.name for run in runs]
  # For a run in a bucket, only SLURM's own output is kept here.
  logs = "." if files.is_remote(folder) else folder
  # A line for each error of a job, over all of its restarts.
  job = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
  errors = f"{shlex.quote(logs)}/slurm-{job}.errors"
  directives = {
    "job-name": "attnres",
    "array": f"0-{len(names) - 1}%{given.options.max_parallel}",
    "nodes": given.nodes,
    "ntasks-per-node": given.gpus,
    "gpus-per-node": given.gpus,
    "time": given.time,
    "signal": f"TERM@{_GRACE_SECONDS}",
    "output": _output(logs),
    "open-mode": "append",
    "partition": given.partition,
    "account": given.account,
  }
  lines = ["#!/bin/bash"]
  lines += [f"#SBATCH --{k}={v}" for k, v in directives.items() if v]
  lines += ["#SBATCH --requeue", ""]
  lines += [f"runs=({shlex.join(names)})"]
  if given.setup:
    lines.append(given.setup)
  flags = "--distributed", launchers.PATIENCE
  command = worker.command(folder, "RUN", *flags)
  words = [shlex.quote(word) for word in command]
  words[command.index("--run=RUN")] = '--run="${runs[$SLURM_ARRAY_TASK_ID]}"'
  lines += [
    # It would end processes that have saved, and the signal hide their status.
    f"srun --kill-on-bad-exit=0 {' '.join(words)}",
    "status=$?",
    f"again=$([ $status = {int(exits.Exit.STOPPED)} ] && echo yes)",
    # srun says 128 and more of signals, which also end the processes of a run
    # whose neighbour has failed.
    f"if [ $status = {int(exits.Exit.AGAIN)} ] || [ $status -gt 128 ]; then",
    f"  echo $status >>{errors}",
    f"  [ $(wc -l <{errors}) -le {given.max_restarts} ] && again=yes",
    "fi",
    f'[ "$again" ] && scontrol requeue "{job}"',
    "exit $status",
  ]
  text = "\n".join(lines) + "\n"
  return launchers.Launch(
    {given.script: text}, [f"sbatch {given.script}"], "script"
  )


def _output(folder: str) -> str:
  """The file of a job: sbatch splits at spaces and expands %."""
  if any(c in folder for c in "\"'\\\n"):
    accepted = "a folder without quotes, backslashes and line ends, for SLURM"
    config_lib.fail_argument("--workdir", folder, accepted)
  path = folder.replace("%", "%%") + "/slurm-%a.txt"
  return f'"{path}"' if " " in path else path
