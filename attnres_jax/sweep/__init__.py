# SPDX-License-Identifier: Apache-2.0
"""Sweeps that run: a folder of runs, one worker command, several launchers.

The room exceeds its budget of 2,800 lines: seven launchers map exit statuses,
settings and dry runs to seven engines, each in 90 to 350 lines, and files that
a kill has damaged are named, or written again.

  folder     the files of a sweep: a workdir per run, and what the runs are
  state      how far a run is: one small file, written atomically
  damage     files that cannot be read, named by path and line
  worker     the command that trains runs of a folder
  work       what it does
  queue      which run is next
  launchers  what starts workers: local, ray, jobset, slurm, skypilot, tpu_vm;
             together trains seeds as one program
  budget     tokens and chip-hours before a launch
  monitor    progress and time left, read from the files of the runs
  rows       finished runs as a table for fits and files
  cli        the flags of run, status, collect and report, for experiments
  actions    what these do
  __main__   the same for any config, with fields to vary
  pages      the report as HTML: tables, curves

`attnres_jax.scaling.grid` defines what a sweep is, `attnres_jax.train.claims`
who may write into a run, `attnres_jax.common.exits` how a worker ends.
"""

# The list of runs in a sweep's folder.
SWEEP = "sweep.json"
LAUNCHERS = (
  "local",
  "together",
  "tpu_vm",
  "skypilot",
  "ray",
  "jobset",
  "slurm",
)
