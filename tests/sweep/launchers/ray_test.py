# SPDX-License-Identifier: Apache-2.0
"""Gangs of workers on real Ray clusters of this machine, and their settings.

The clusters start in processes of their own; the slow tests need ray.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from attnres_jax.common import exits
from attnres_jax.scaling import grid
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import launchers
from attnres_jax.sweep import state as state_lib
from attnres_jax.sweep.launchers import ray as launcher
from tests import tiny_run

needs_ray = pytest.mark.needs("ray")
# Recovery does not depend on the scheme, and this one compiles fastest.
FIELDS = tiny_run.FIELDS | {
  "model.residual.name": "prenorm",
  "train.steps": 400,
  "train.eval_every": 100,
  "train.depth_every": 0,
  "checkpoint.every_steps": 20,
}
LAUNCH = """
import json, sys
from attnres_jax.sweep import folder, launchers
path, settings = sys.argv[1], json.loads(sys.argv[2])
options = launchers.Options(max_parallel=2, settings=settings)
sys.exit(launchers.launch("ray", folder.read(path), path, options))
"""


@pytest.mark.parametrize("come", [True, False])
def test_a_worker_that_is_refused_alone_ends_its_gang(monkeypatch, come):
  never = exits.Exit.NEVER
  work = launcher.work
  monkeypatch.setattr(work.folder_lib, "read_run", lambda *_: None)
  monkeypatch.setattr(work, "_begin", lambda *_: (None, -1))
  monkeypatch.setattr(work, "_train", lambda *_: (never, ""))
  monkeypatch.setattr(work.processes, "all_come", lambda _: come)
  expected = contextlib.nullcontext()
  if not come:
    expected = pytest.raises(launcher.RunError, match="a_run: failed")
  with expected:
    assert launcher._work({"folder": "sweep", "name": "a_run"}) == never


@needs_ray
@pytest.mark.parametrize(
  "name,slices,workers,chips",
  [
    ("v5e:1x1", 1, 1, 1),
    ("v6e:2x4", 1, 1, 8),
    ("v6e-16", 1, 4, 4),
    ("v5p-128", 2, 32, 4),
    ("tpu7x:2x2x2", 3, 6, 4),
  ],
)
def test_a_slice_has_a_worker_per_host(name, slices, workers, chips):
  settings = {"accelerator": name, "slices": str(slices)}
  parsed = launcher.parse(
    launchers.read(launcher, launchers.Options(settings=settings))
  )
  arguments = launcher._scaling(parsed)
  assert arguments["num_workers"] == workers
  assert arguments["resources_per_worker"]["TPU"] == chips
  assert launcher._gang(parsed) == f"{workers} x {name}:"
  # Ray refuses kinds and shapes that it does not know, and odd numbers.
  scaling = importlib.import_module("ray.train").ScalingConfig(**arguments)
  assert scaling.topology == launcher.slices.parse("", name).shape


@pytest.fixture(autouse=True)
def apart(monkeypatch):
  """Ray's files in a folder of the test, away from clusters that are here."""
  # Sockets lie in it, so its name has to be short.
  with tempfile.TemporaryDirectory(
    prefix="ray_", ignore_cleanup_errors=True
  ) as folder:
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield


def _prepare(folder, fields, seeds):
  resolve = grid.config_resolver(str(tiny_run.ROOT / tiny_run.SPEC))
  runs = grid.collect(
    lambda add: [add(seed=seed) for seed in seeds],
    lambda overrides: resolve(fields | dict(overrides)),
  )
  folder_lib.prepare(folder, runs, tiny_run.SPEC)
  return [folder / run.name for run in runs]


@contextlib.contextmanager
def _started(folder, *command):
  """A launcher; the cluster that it starts ends with it."""
  environment = tiny_run.environment() | {
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # A busy machine is slow, not broken.
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
  }
  with open(folder / "output.txt", "w") as output:
    process = subprocess.Popen(
      [sys.executable, *command], cwd=tiny_run.ROOT, env=environment,
      stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
  try:
    yield process
  finally:
    process.kill()
    process.wait()


def _finish(process, folder, status=0, seconds=500):
  process.wait(seconds)
  text = (folder / "output.txt").read_text()
  assert process.returncode == status, text[-5000:]
  return text


def _wait(process, folder, condition, seconds=400):
  deadline = time.monotonic() + seconds
  while not (result := condition()):
    text = (folder / "output.txt").read_text()[-5000:]
    assert process.poll() is None and time.monotonic() < deadline, text
    time.sleep(0.05)
  return result


def _descendants(pid):
  """Processes below one, without processes that end meanwhile."""
  listing = subprocess.run(
    ["ps", "-e", "-o", "pid=,ppid=,args="], capture_output=True, text=True
  )
  children, names = {}, {}
  for line in listing.stdout.splitlines():
    child, parent, args = line.split(maxsplit=2)
    children.setdefault(int(parent), []).append(int(child))
    names[int(child)] = args
  names_of, queue = {}, [pid]
  while queue:
    for child in children.get(queue.pop(), []):
      names_of[child] = names[child]
      queue.append(child)
  return names_of


def _gang(process):
  args = _descendants(process.pid)
  return {pid for pid, name in args.items() if "RayTrainWorker" in name}


@needs_ray
@pytest.mark.slow
def test_a_gang_that_loses_workers_ends_like_one_that_does_not(tmp_path):
  fields = FIELDS | tiny_run.corpus(tmp_path) | {"seed": 3}
  folder = tmp_path / "sweep"
  (workdir,) = _prepare(folder, fields, [3])
  settings = json.dumps({"address": "local", "workers": "2"})
  with _started(tmp_path, "-c", LAUNCH, str(folder), settings) as process:
    # The worker that has the claim, then the other one.
    for claimer, at in ((True, 60), (False, 200)):
      _wait(process, tmp_path, lambda at=at: tiny_run.last_step(workdir) >= at)
      before = state_lib.read(workdir)
      gang = _gang(process)
      assert before.pid in gang and len(gang) == 2, gang
      victim = before.pid if claimer else (gang - {before.pid}).pop()
      os.kill(victim, signal.SIGKILL)
      _wait(
        process,
        tmp_path,
        lambda old=before: state_lib.read(workdir).attempts > old.attempts,
      )
    text = _finish(process, tmp_path)
  assert f"{workdir.name}: done" in text
  state = state_lib.read(workdir)
  assert state.status == state_lib.DONE and state.attempts == 3
  resumes = tiny_run.events(workdir, "resume")
  assert [row["processes"] for row in resumes] == [2, 2]
  assert resumes[0]["step"] >= 40 and resumes[1]["step"] >= 180
  assert all(row["step"] < 400 for row in resumes)

  # The run by two processes without Ray.
  for member in tiny_run.start_two(tmp_path / "alone", fields):
    tiny_run.finish(member, quiet=False)
  tiny_run.assert_same_run(tmp_path / "alone", workdir)


@needs_ray
@pytest.mark.slow
def test_a_run_that_cannot_be_trained_fails_and_others_continue(tmp_path):
  fields = FIELDS | tiny_run.corpus(tmp_path) | {"train.steps": 20}
  folder = tmp_path / "sweep"
  good, bad = _prepare(folder, fields, [1, 2])
  run = json.loads((bad / folder_lib.RUN).read_text())
  run["config"]["data"]["path"] = str(tmp_path / "nothing")
  (bad / folder_lib.RUN).write_text(json.dumps(run))
  settings = json.dumps({"address": "local", "max_restarts": "1"})
  with _started(tmp_path, "-c", LAUNCH, str(folder), settings) as process:
    text = _finish(process, tmp_path, status=1)
  assert f"{good.name}: done" in text and f"{bad.name}: failed: " in text
  state = state_lib.read(bad)
  assert state.status == state_lib.FAILED and state.attempts == 2
  assert "nothing" in state.error and state.error in text


@needs_ray
@pytest.mark.slow
def test_runs_share_out_slices_and_outlive_the_loss_of_one(tmp_path):
  """Two runs, two slices of two hosts each; one host of a slice is lost."""
  fields = FIELDS | tiny_run.corpus(tmp_path)
  folder = tmp_path / "sweep"
  runs = _prepare(folder, fields, [1, 2])
  with _started(tmp_path, "-m", "tests.fake_slices", str(folder)) as process:
    text = _finish(process, tmp_path, seconds=900)
  gangs = {run.name: [] for run in runs}
  for line in (folder / "gangs.jsonl").read_text().splitlines():
    gangs[(row := json.loads(line))["run"]].append(row)
  slices_of = {}
  for name, rows in gangs.items():
    # One attempt after the other, each on both hosts of one slice.
    assert len(rows) % 2 == 0 and all(row["processes"] == 2 for row in rows)
    slices_of[name] = []
    for pair in zip(rows[::2], rows[1::2]):
      assert {row["host"] for row in pair} == {"0", "1"}
      assert len(slices := {row["slice"] for row in pair}) == 1
      slices_of[name] += slices
  assert {slices[0] for slices in slices_of.values()} == {"slice-0", "slice-1"}
  last, lost = sorted(runs, key=lambda run: slices_of[run.name], reverse=True)
  assert slices_of[last.name] == ["slice-1"]
  assert slices_of[lost.name] == ["slice-0", "slice-1"]
  # Both were trained at the same time, and the second slice was waited for.
  begun = [gangs[run.name][0]["time"] for run in runs]
  assert max(begun) < min(state_lib.read(run).heartbeat for run in runs)
  again = gangs[lost.name][-1]["time"]
  assert again > state_lib.read(last).heartbeat
  (resume,) = tiny_run.events(lost, "resume")
  assert resume["step"] >= 20 and resume["processes"] == 2
  for run in runs:
    assert f"{run.name}: done" in text
    assert max(tiny_run.rows(run, "train")) == FIELDS["train.steps"]
