# SPDX-License-Identifier: Apache-2.0
"""Scripts for SLURM, run by bash with stand-ins for its commands."""

import os
import pathlib
import subprocess
import sys
import types

import pytest

from attnres_jax import config as config_lib
from attnres_jax.scaling import grid
from attnres_jax.sweep import launchers
from attnres_jax.sweep import state as state_lib
from attnres_jax.sweep import worker
from attnres_jax.sweep.launchers import slurm
from tests.docs import extend_test

NAMES = ["a-1", "b_2", "c.3"]


def script_of(settings, max_parallel=2, folder="gs://bucket/sweep"):
  options = launchers.Options(max_parallel=max_parallel, settings=settings)
  runs = [grid.Run(name, {}, {}) for name in NAMES]
  planned = slurm.plan(runs, folder, launchers.read(slurm, options))
  (text,) = planned.files.values()
  return text


def directives(text):
  lines = [line for line in text.splitlines() if line.startswith("#SBATCH --")]
  pairs = [line.removeprefix("#SBATCH --").partition("=") for line in lines]
  return {name: value for name, _, value in pairs}


def run(text, folder, task, srun_status):
  """Runs a script as SLURM does; what was called, and how it ended."""
  calls = folder / "calls.txt"
  calls.write_text("")
  for name in ("srun", "scontrol"):
    status = srun_status if name == "srun" else 0
    (folder / name).write_text(
      f'#!/bin/bash\nprintf "%s\\n" {name} "$@" >> {calls}\nexit {status}\n'
    )
    (folder / name).chmod(0o755)
  environment = os.environ | {
    "PATH": f"{folder}:{os.environ['PATH']}",
    "SLURM_ARRAY_JOB_ID": "77",
    "SLURM_ARRAY_TASK_ID": str(task),
  }
  path = folder / "sweep.sbatch"
  path.write_text(text)
  ended = subprocess.run(
    ["bash", str(path)], env=environment, cwd=folder, timeout=60
  )
  return calls.read_text().splitlines(), ended.returncode


@pytest.mark.parametrize("task", range(3))
def test_each_task_trains_its_run(tmp_path, task):
  folder = "/data/a b/sweep"
  calls, status = run(script_of({}, folder=folder), tmp_path, task, 0)
  assert status == 0
  assert calls[:2] == ["srun", "--kill-on-bad-exit=0"]
  expected = worker.command(folder, NAMES[task])
  assert calls[2 : 2 + len(expected)] == expected
  assert calls[2 + len(expected) :] == [
    "--distributed", "--patience_seconds=180",
  ]  # fmt: skip


@pytest.mark.parametrize("folder", ["gs://bucket/sweep", "a sweep"])
def test_only_what_may_end_otherwise_queues_up_again(tmp_path, folder):
  """Stopped before a time limit; failed or killed, if not too often."""
  (tmp_path / "a sweep").mkdir()
  text = script_of({"max_restarts": "3"}, folder=folder)
  for ended, expected in [
    (0, False), (2, False), (3, False), (5, False), (4, True), (1, True),
    (137, True), (4, True), (134, True), (4, True), (1, False), (137, False),
    (4, True),
  ]:  # fmt: skip
    calls, status = run(text, tmp_path, 1, ended)
    assert status == ended
    again = calls[calls.index("scontrol") :] if "scontrol" in calls else []
    assert again == (["scontrol", "requeue", "77_1"] if expected else [])


def test_resources_of_the_jobs():
  settings = {
    "nodes": "2", "gpus": "8", "time": "2-00:00:00", "partition": "h100",
    "account": "lab",
  }  # fmt: skip
  lines = directives(script_of(settings, max_parallel=3))
  assert lines["array"] == "0-2%3"
  assert lines["nodes"] == "2"
  # JAX wants a process per GPU.
  assert lines["ntasks-per-node"] == lines["gpus-per-node"] == "8"
  assert lines["time"] == "2-00:00:00" and lines["signal"] == "TERM@300"
  assert lines["partition"] == "h100" and lines["account"] == "lab"
  assert "requeue" in lines
  assert not {"partition", "account"} & directives(script_of({})).keys()


def test_setup_comes_before_the_workers(tmp_path):
  text = script_of({"setup": f"echo ready > {tmp_path}/ready; false"})
  calls, status = run(text, tmp_path, 0, 0)
  assert (tmp_path / "ready").exists() and calls[0] == "srun" and status == 0


@pytest.mark.parametrize(
  "name,submit,script",
  [("slurm", "sbatch", "sweep.sbatch"), ("pbs", "qsub", "sweep.pbs")],
)
def test_launch_writes_what_is_not_done(
  name, submit, script, tmp_path, capsys, monkeypatch
):
  """This launcher, and the one of docs/extend.md."""
  if name == "pbs":
    module = types.ModuleType("attnres_jax.sweep.launchers.pbs")
    module.__dict__.update(extend_test.run("extend.md", "Add a launcher"))
    monkeypatch.setattr(launchers, "LAUNCHERS", (*launchers.LAUNCHERS, "pbs"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
  monkeypatch.chdir(tmp_path)
  script, done = pathlib.Path(script), state_lib.State(state_lib.DONE)
  runs = [grid.Run(run_name, {}, {}) for run_name in NAMES]
  for run_name in NAMES:
    pathlib.Path("sweep", run_name).mkdir(parents=True)
  state_lib.write("sweep/b_2", done)
  launch = lambda **options: launchers.launch(
    name, runs, "sweep", launchers.Options(**options)
  )
  assert launch(dry_run=True) == 0 and not script.exists()
  dry = capsys.readouterr().out
  assert launch() == 0
  text = script.read_text()
  assert dry == f"{text}# {submit} {script}\n"
  assert f"{submit} {script}" in capsys.readouterr().out
  assert f"{tmp_path}/sweep" in text
  assert ["a-1" in text, "b_2" in text, "c.3" in text] == [True, False, True]
  script.write_text("somebody's")
  with pytest.raises(config_lib.ConfigError, match="--set=script"):
    launch()
  script.unlink()
  for run_name in NAMES:
    state_lib.write(f"sweep/{run_name}", done)
  assert launch() == 0
  assert "no run is left to train" in capsys.readouterr().out
