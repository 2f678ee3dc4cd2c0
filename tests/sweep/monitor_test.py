# SPDX-License-Identifier: Apache-2.0
"""Progress, and estimates of the remaining time."""

import json

import pytest

from attnres_jax.sweep import monitor
from attnres_jax.sweep import state as state_lib
from tests.sweep import tiny_sweep


def progress(name, status="pending", **values):
  defaults = dict(residual="prenorm", steps=100)
  return monitor.Progress(name=name, status=status, **(defaults | values))


def test_time_left_is_measured():
  small = progress("small", "done", step=100, step_seconds=0.1)
  running = progress("running", "running", step=40, step_seconds=0.3)
  new = progress("new")
  runs = [small, running, new]
  assert monitor.seconds_left(small) == 0.0
  assert monitor.seconds_left(running) == pytest.approx(60 * 0.3)
  # A new run is like the mean of the others, 10 and 30 seconds.
  assert monitor.seconds_left(new) is None
  assert monitor.total_seconds_left(runs, 1) == pytest.approx(18 + 20)
  # No run takes less than its own time, however many go on at once.
  assert monitor.total_seconds_left(runs, 9) == pytest.approx(20)


def test_nothing_measured_and_nothing_left():
  runs = [progress("a"), progress("b")]
  assert monitor.total_seconds_left(runs, 1) is None
  assert "? left with 1 at a time" in monitor.summary(runs, 1)
  assert monitor.seconds_left(progress("a", "diverged")) == 0.0
  done = [progress("a", "done", step=100, step_seconds=0.1)]
  assert monitor.total_seconds_left(done, 1) == 0.0
  assert monitor.summary(done, 1) == "1/1 done"
  assert monitor.duration(9.6) == "0:00:10"
  assert monitor.duration(27 * 3600 + 61) == "27:01:01"


def test_runs_of_a_folder(tmp_path):
  source = tiny_sweep.write(tmp_path / "tiny.py", seeds=(0, 1))
  first, second = tiny_sweep.prepare(tmp_path / "sweep", source)
  rows = [
    {"split": "event", "event": "start", "step": 0, "lost_steps": 0},
    {"split": "train", "step": 3, "loss": 5.5, "step_seconds": 0.5,
     "data_wait_seconds": 0.0},
    {"split": "validation", "step": 3, "loss": 5.25},
  ]  # fmt: skip
  workdir = tmp_path / "sweep" / first.name
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  # A last line that is being written.
  (workdir / "metrics.jsonl").write_text(lines + '{"split": "tr')
  state = state_lib.State(status="running", attempts=2, seconds=7.0)
  state_lib.write(workdir, state)
  states = monitor.of_folder(tmp_path / "sweep")
  assert [entry.name for entry in states] == [first.name, second.name]
  entry = states[0]
  assert (entry.step, entry.steps, entry.attempts) == (3, 20, 2)
  assert (entry.train_loss, entry.validation_loss) == (5.5, 5.25)
  # No live process holds it.
  assert entry.status == monitor.INTERRUPTED
  assert entry.goodput.step == pytest.approx(1.5)
  assert states[1].status == state_lib.PENDING
  failed = state_lib.State(status="failed", attempts=1, error="Error: cause")
  state_lib.write(workdir, failed)
  table = monitor.table(monitor.of_folder(tmp_path / "sweep"))
  assert f"{first.name}: Error: cause" in table
  assert "5.5000" in table and "1 failed" in table
