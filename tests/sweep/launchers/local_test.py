# SPDX-License-Identifier: Apache-2.0
"""The local queue, with fake workers."""

import dataclasses
import os
import pathlib
import signal
import sys
import threading
import time

import pytest

from attnres_jax.scaling import grid
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import launchers
from attnres_jax.sweep import state as state_lib
from attnres_jax.sweep import worker
from attnres_jax.sweep.launchers import local
from attnres_jax.train import claims
from tests import tiers
from tests.sweep import tiny_sweep

# Behaves according to its seed, and writes lines to `acts`.
_WORKER = """
import json, os, pathlib, signal, sys, time
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
workdir = folder / name
acts = folder / "acts"
def say(what):
  with open(acts, "a") as file:
    file.write(name.split("-")[0] + " " + what + "\\n")
def end(status, code, error=""):
  state = json.dumps({"status": status, "error": error})
  (workdir / "state.json").write_text(state)
  sys.exit(code)
say("starts")
seed = int(name.split("-")[0].removeprefix("seed"))
kind = KINDS[seed]
print("printed by", seed, flush=True)
if kind == "fail":
  end("failed", 1, "Error: on purpose")
if kind == "full":
  print("error: file: no space left on device: full", flush=True)
  end("failed", 1)
if kind == "die":
  os.kill(os.getpid(), signal.SIGKILL)
if kind in ("refused", "diverged"):
  end(kind, {"refused": 2, "diverged": 3}[kind], "Error: for good")
if kind == "busy":
  before = acts.read_text().count(f"seed{seed} starts")
  if before == 1:
    sys.exit(1)
if kind == "long":
  def stop(*unused):
    say("stops")
    end("stopped", 4)
  signal.signal(signal.SIGTERM, stop)
  say("works")
  time.sleep(600)
if kind == "deaf":
  signal.signal(signal.SIGTERM, lambda *unused: say("hears"))
  say("works")
  while True:
    time.sleep(600)
say("ends")
end("done", 0)
"""


@pytest.fixture
def sweep(tmp_path, monkeypatch):
  """Launches runs that end as instructed; returns status and acts."""

  def make(*kinds):
    seeds = tuple(range(len(kinds)))
    source = tiny_sweep.write(tmp_path / "tiny.py", seeds=seeds)
    runs = tiny_sweep.prepare(tmp_path / "sweep", source)
    script = tmp_path / "worker.py"
    script.write_text(f"KINDS = {kinds}\n{_WORKER}")
    monkeypatch.setattr(
      worker,
      "command",
      lambda folder, name, python: [python, str(script), str(folder), name],
    )
    monkeypatch.setattr(local, "_HELD_SECONDS", 0.1)
    return Sweep(tmp_path / "sweep", runs)

  return make


@dataclasses.dataclass
class Sweep:
  folder: pathlib.Path
  runs: list[grid.Run]

  def launch(self, **options):
    options = launchers.Options(**options)
    return launchers.launch("local", self.runs, self.folder, options)

  @property
  def acts(self):
    path = self.folder / "acts"
    return path.read_text().split("\n")[:-1] if path.exists() else []

  def wait_for(self, *acts):
    deadline = time.monotonic() + 60
    while not set(acts) <= set(self.acts):
      assert time.monotonic() < deadline, self.acts
      time.sleep(0.02)


def test_all_done(sweep):
  case = sweep("ok", "ok", "ok")
  assert case.launch() == 0
  assert case.acts == [
    f"seed{i} {act}" for i in range(3) for act in ("starts", "ends")
  ]
  log = case.folder / case.runs[1].name / folder_lib.LOG
  assert log.read_text() == "printed by 1\n"
  # Again: nothing is left to do.
  assert case.launch() == 0
  assert len(case.acts) == 6


def test_a_failed_run_stops_no_other(sweep, capfd):
  case = sweep("ok", "fail", "die", "ok")
  once = {"max_restarts": "0"}
  assert case.launch(max_parallel=2, settings=once) == 1
  assert {f"seed{i} ends" for i in (0, 3)} <= set(case.acts)
  out = capfd.readouterr().out
  assert "failed (exit status 1): Error: on purpose; see" in out
  assert "failed (killed by signal 9)" in out
  # The next launch tries again what failed, and only that.
  before = len(case.acts)
  assert case.launch() == 1
  # Once more each, by default.
  assert case.acts[before:] == ["seed1 starts", "seed2 starts"] * 2
  assert capfd.readouterr().out.count("; trying again") == 2


def test_a_full_disk_is_one_error_and_ends_the_launch(sweep):
  case = sweep("full", "ok", "ok")
  with pytest.raises(OSError, match=r"no space left on device: [\d,]+ free"):
    case.launch()
  assert case.acts == ["seed0 starts"]


def test_what_cannot_be_cured_is_not_started_again(sweep, capfd):
  case = sweep("refused", "diverged", "ok")
  assert case.launch(settings={"max_restarts": "5"}) == 1
  starts = [f"seed{i} starts" for i in range(3)]
  assert case.acts == [*starts, "seed2 ends"]
  out = capfd.readouterr().out
  assert "refused (exit status 2): Error: for good; see" in out
  assert "diverged (exit status 3): Error: for good; see" in out
  # A person may have mended what was refused; the same config diverges again.
  assert case.launch() == 1
  assert case.acts[4:] == ["seed0 starts"]


@tiers.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_workers_save_and_starts_no_other(sweep, capfd, number):
  case = sweep("long", "long", "ok")

  def interrupt():
    case.wait_for("seed0 works", "seed1 works")
    time.sleep(0.5)  # Of more than max_parallel, the third would start.
    os.kill(os.getpid(), number)

  thread = threading.Thread(target=interrupt)
  thread.start()
  before = signal.getsignal(number)
  assert case.launch(max_parallel=2) == launchers.INTERRUPTED
  thread.join()
  assert {"seed0 stops", "seed1 stops"} <= set(case.acts)
  assert "seed2 starts" not in case.acts
  assert "rerun the same command to resume" in capfd.readouterr().err
  assert signal.getsignal(number) == before


def test_no_worker_outlives_a_launcher_that_fails(sweep, monkeypatch):
  """Its own error ends the launch; the workers are told to stop before."""
  case, reap = sweep("long", "long"), local._Queue._reap

  def fail(self):
    if {"seed0 works", "seed1 works"} <= set(case.acts):
      raise RuntimeError("of the launcher")
    reap(self)

  monkeypatch.setattr(local._Queue, "_reap", fail)
  with pytest.raises(RuntimeError, match="of the launcher"):
    case.launch(max_parallel=2)
  assert {"seed0 stops", "seed1 stops"} <= set(case.acts)


def test_a_second_ctrl_c_kills(sweep):
  case = sweep("deaf")

  def interrupt():
    case.wait_for("seed0 works")
    os.kill(os.getpid(), signal.SIGINT)
    case.wait_for("seed0 hears")
    os.kill(os.getpid(), signal.SIGINT)

  thread = threading.Thread(target=interrupt)
  thread.start()
  assert case.launch() == launchers.INTERRUPTED
  thread.join()


def test_busy_runs_are_looked_at_again(sweep):
  case = sweep("busy", "ok")
  assert case.launch() == 0
  assert case.acts.count("seed0 starts") == 2
  assert "seed0 ends" in case.acts


def test_a_store_that_fails_when_a_worker_ends_is_asked_again(
  sweep, monkeypatch, capsys
):
  case = sweep("busy", "ok")
  is_held, failed = claims.is_held, []

  def fail_once(workdir):
    its_end = workdir.name.startswith("seed0") and case.acts
    if its_end and not failed:
      failed.append(workdir)
      raise OSError("the store fails")
    return is_held(workdir)

  monkeypatch.setattr(claims, "is_held", fail_once)
  assert case.launch() == 0
  assert case.acts.count("seed0 starts") == 2 and "seed0 ends" in case.acts
  assert failed and ": the store fails" in capsys.readouterr().out


def test_a_store_that_fails_before_a_worker_starts_is_asked_again(
  sweep, monkeypatch, capsys
):
  case = sweep("ok")
  answers = [[], OSError("the store fails")]

  def todo(*_):
    answer = answers.pop()
    if isinstance(answer, OSError):
      raise answer
    return answer

  monkeypatch.setattr(launchers, "todo", todo)
  monkeypatch.setattr(local.files, "is_remote", lambda path: True)
  monkeypatch.setattr(local, "_HELD_REMOTE_SECONDS", 0.1)
  assert case.launch() == 0
  assert not answers and "trying again" in capsys.readouterr().out


def test_a_run_that_another_worker_has_is_left_to_it(sweep):
  case = sweep("ok", "ok")
  workdir = case.folder / case.runs[0].name
  attempt = state_lib.begin(workdir)

  def release():
    case.wait_for("seed1 ends")
    time.sleep(0.3)
    attempt.end(state_lib.DONE)

  thread = threading.Thread(target=release)
  thread.start()
  assert case.launch(max_parallel=2) == 0
  thread.join()
  assert case.acts == ["seed1 starts", "seed1 ends"]


def test_dry_run_says_exactly_what_would_be_started(tmp_path, capsys):
  source = tiny_sweep.write(tmp_path / "tiny.py", seeds=(0,))
  (run,) = grid.load(source)
  options = launchers.Options(dry_run=True)
  assert launchers.launch("local", [run], tmp_path / "a b", options) == 0
  assert capsys.readouterr().out == (
    f"{sys.executable} -m attnres_jax.sweep.worker"
    f" '--folder={tmp_path}/a b' --run={run.name}\n"
  )
  assert not (tmp_path / "a b").exists()


def test_cores_are_shared_out(monkeypatch):
  if not hasattr(os, "sched_getaffinity"):
    pytest.skip("no affinity on this system")
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5, 7})
  assert local._cores(0, 1) is None
  assert local._cores(0, 6) is None
  shares = [local._cores(slot, 2) for slot in range(2)]
  assert sorted(sum(shares, [])) == [0, 1, 2, 5, 7]
  assert {len(share) for share in shares} == {2, 3}
