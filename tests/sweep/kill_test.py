# SPDX-License-Identifier: Apache-2.0
"""Real sweeps: killed anywhere, launched twice, out of disk."""

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from attnres_jax.common import csv_rows
from attnres_jax.sweep import cli
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import monitor
from tests import tiny_run
from tests.sweep import tiny_sweep

FIELDS = {
  "train.steps": 120,
  "train.eval_every": 40,
  "train.depth_every": 0,
  "checkpoint.every_steps": 10,  # Saving takes longer than the steps.
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
  path = tmp_path_factory.mktemp("config") / "tiny.py"
  return tiny_sweep.write(path, seeds=(0, 1), **FIELDS)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, source):
  """The folder of an undisturbed sweep."""
  folder = tmp_path_factory.mktemp("whole") / "sweep[1]"
  code, text = tiny_sweep.launch(folder, source, "--max_parallel=2")
  assert code == 0, text
  assert "2/2 done" in text
  return folder


def _assert_same(unbroken, broken):
  names = [run.name for run in folder_lib.read(unbroken)]
  assert names == [run.name for run in folder_lib.read(broken)]
  for name in names:
    tiny_run.assert_same_run(unbroken / name, broken / name)
    assert tiny_sweep.state(broken / name)["status"] == "done"
    assert (broken / name / "summary.json").exists()
  results = [
    monitor.rows(monitor.of_folder(folder)) for folder in (unbroken, broken)
  ]
  for ours, theirs in zip(*results, strict=True):
    for name, value in ours.items():
      # Times may differ, results may not. The last run of a sweep may have more
      # cores.
      if not name.endswith("seconds") and name not in (
        "attempts",
        "chip_hours",
        "lost_steps",
        "hardware",
      ):
        assert value == theirs[name], name


def _rows(folder):
  """Lines of metrics that all runs have written so far."""
  files = folder.glob("*/metrics.jsonl")
  return sum(file.read_text().count("\n") for file in files)


def _wait(rng, process, folder, anywhere):
  """Until a random moment: of a launch, or of its training."""
  rows, deadline = _rows(folder), time.monotonic() + 240
  if anywhere and rng.random() < 0.5:
    deadline = time.monotonic() + rng.uniform(0, 10)
    rows = 10**9
  target = rows + rng.randint(1, 30)
  while process.poll() is None and time.monotonic() < deadline:
    if _rows(folder) >= target:
      break
    time.sleep(0.005)


def _kill_at_random(rng, folder, source, anywhere):
  """Launches, and kills the launcher, its workers, one of them, or all.

  Or it is a Ctrl-C, after which nothing is left running. Returns whether the
  launcher was still at work.
  """
  process = tiny_sweep.start(folder, source, "--max_parallel=2")
  _wait(rng, process, folder, anywhere)
  at_work = process.poll() is None
  workers = tiny_sweep.workers(process, folder)
  if rng.random() < 0.2 and process.poll() is None:
    process.send_signal(signal.SIGINT)
    assert tiny_sweep.finish(process)[0] in (0, -signal.SIGINT, 130)
    return at_work
  groups = [[process.pid], workers, workers[:1], [process.pid, *workers]]
  victims = rng.choice(groups)
  print("killed", len(victims), "of", 1 + len(workers))
  for pid in victims:
    try:
      os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
      pass
  # A launcher that lost its workers ends by itself.
  if process.pid in victims:
    process.wait()
  else:
    code, text = tiny_sweep.finish(process)
    assert code in (0, 1), text
  return at_work


def _survive(unbroken, source, parent, kills, anywhere):
  """Kills a sweep at work so often; one that is done makes way for another."""
  seed = random.randrange(2**32)
  print("random seed", seed)
  rng = random.Random(seed)
  folders = (parent / f"sweep_{i}" for i in itertools.count())
  folder = next(folders)
  for _ in range(kills):
    while not _kill_at_random(rng, folder, source, anywhere):
      _finish(unbroken, source, folder)
      folder = next(folders)
  _finish(unbroken, source, folder)


def _finish(unbroken, source, folder):
  code, text = tiny_sweep.launch(folder, source, "--max_parallel=2")
  assert code == 0, text
  _assert_same(unbroken, folder)


@pytest.mark.more
def test_killed_sweep_ends_like_an_undisturbed_one(unbroken, source, tmp_path):
  _survive(unbroken, source, tmp_path, kills=1, anywhere=False)


@pytest.mark.slow
def test_twenty_kills(tmp_path):
  path = tmp_path / "tiny.py"
  fields = FIELDS | {"train.steps": 600, "train.eval_every": 200}
  source = tiny_sweep.write(path, seeds=(0, 1, 2, 3), **fields)
  unbroken = tmp_path / "whole"
  code, text = tiny_sweep.finish(
    tiny_sweep.start(unbroken, source, "--max_parallel=2")
  )
  assert code == 0, text
  _survive(unbroken, source, tmp_path, kills=20, anywhere=True)


@pytest.mark.slow
def test_two_launchers_at_once(unbroken, source, tmp_path):
  folder = tmp_path / "sweep"
  launchers = [
    tiny_sweep.start(folder, source, "--max_parallel=2") for _ in range(2)
  ]
  for launcher in launchers:
    code, text = tiny_sweep.finish(launcher)
    assert code == 0, text
  _assert_same(unbroken, folder)
  for run in folder_lib.read(folder):
    # No run was trained twice.
    assert len(tiny_run.events(folder / run.name, "start")) == 1
    assert not tiny_run.events(folder / run.name, "resume")


@pytest.mark.slow
def test_a_disk_that_fills_up_during_a_sweep(unbroken, source, tmp_path):
  """On a real file system of a few megabytes, where one may be mounted."""
  if (
    shutil.which("unshare") is None
    or subprocess.run(
      ["unshare", "-rm", "true"], capture_output=True, check=False
    ).returncode
  ):
    pytest.skip("no mounts without privileges here")
  small, out = tmp_path / "small", tmp_path / "out"
  small.mkdir()
  script = (
    f"mount -t tmpfs -o size=1500k tmpfs {small} && "
    f"{{ python=$0; $python -m tests.sweep.tiny_sweep --config={source}"
    f" --workdir={small}/sweep; code=$?; cp -r {small}/sweep {out};"
    " exit $code; }"
  )
  process = subprocess.run(
    ["unshare", "-rm", "sh", "-c", script, sys.executable],
    cwd=tiny_run.ROOT, env=tiny_run.environment(), capture_output=True,
    text=True, check=False, timeout=300,
  )  # fmt: skip
  assert process.returncode == 1, process.stdout + process.stderr
  assert "no space left on device: " in process.stderr
  # With room again, the same command finishes from what was saved.
  code, text = tiny_sweep.finish(tiny_sweep.start(out, source))
  assert code == 0, text
  _assert_same(unbroken, out)


@pytest.mark.more
def test_report_rows_and_status(unbroken, tmp_path, capsys):
  for run in folder_lib.read(unbroken):
    log = (unbroken / run.name / "log.txt").read_text()
    assert re.search(r"^cost: [\d.e-]+ chip-hours, 7,680 tokens$", log, re.M)
  assert (unbroken / cli.REPORT).read_text() == str(unbroken)
  target = tmp_path / "rows.csv"
  workdir = f"--workdir={unbroken}"
  arguments = ["collect", workdir, f"--out={target}"]
  assert cli.main(tiny_sweep.EXPERIMENT, arguments) == 0
  assert "2 of 2 runs" in capsys.readouterr().out
  for row, run in zip(
    csv_rows.read(target), folder_lib.read(unbroken), strict=True
  ):
    summary = json.loads((unbroken / run.name / "summary.json").read_text())
    assert float(row["validation_loss"]) == pytest.approx(
      summary["validation_loss"], abs=1e-6
    )
    assert row["seed"] == str(run.overrides["seed"])
    assert int(row["tokens"]) == 120 * 4 * 16
  assert cli.main(tiny_sweep.EXPERIMENT, ["status", workdir]) == 0
  table = capsys.readouterr().out
  assert "2/2 done" in table and table.count("120/120") == 2
