# SPDX-License-Identifier: Apache-2.0
"""Processes that are really killed, and runs that resume after them."""

import random
import signal
import time

import pytest

from attnres_jax.common import exits
from attnres_jax.train import checkpoint
from tests import tiny_run

# Saving takes longer than the steps.
SAVE_EVERY = 10
# Recovery does not depend on the scheme, and this one compiles fastest.
FIELDS = {
  "model.residual.name": "prenorm",
  "train.steps": 120,
  "train.eval_every": 40,
  "train.depth_every": 30,
  "checkpoint.every_steps": SAVE_EVERY,
}


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
  return tiny_run.corpus(tmp_path_factory.mktemp("data")) | FIELDS


@pytest.fixture(scope="module")
def unbroken(fields, tmp_path_factory):
  """The folder of a run that nothing disturbed."""
  workdir = tmp_path_factory.mktemp("whole")
  tiny_run.finish(tiny_run.start(workdir, fields))
  return workdir


def _last_save(workdir):
  return max(checkpoint.all_steps(workdir), default=0)


def _unfinished_saves(workdir):
  return list((workdir / "checkpoints").glob("*.orbax-checkpoint-tmp"))


def _kill(process):
  tiny_run.kill(process)
  assert process.returncode == -signal.SIGKILL


def _kill_during_save(workdir, fields):
  """Kills a run during a save; True if the save was interrupted."""
  process = tiny_run.start(workdir, fields)
  first = tiny_run.last_step(workdir)
  tiny_run.wait_until(lambda: tiny_run.last_step(workdir) > first + 1, process)
  tiny_run.wait_until(lambda: _unfinished_saves(workdir), process)
  _kill(process)
  return bool(_unfinished_saves(workdir))


def _stop(workdir, fields, kind):
  """Stops a run by a signal: every step taken is kept. Returns the last."""
  first = tiny_run.last_step(workdir)
  process = tiny_run.start(workdir, fields)
  tiny_run.wait_until(lambda: tiny_run.last_step(workdir) > first + 2, process)
  process.send_signal(kind)
  out = tiny_run.finish(process, status=exits.Exit.STOPPED)
  stopped = tiny_run.events(workdir, "stopped")[-1]
  assert stopped["signal"] == kind.name
  assert stopped["step"] == tiny_run.last_step(workdir)
  assert stopped["step"] == checkpoint.all_steps(workdir)[-1]
  assert f"stopped after step {stopped['step']} with" in out
  assert not _unfinished_saves(workdir)
  return stopped["step"]


@pytest.mark.more
def test_killed_run_ends_like_an_uninterrupted_one(fields, unbroken, tmp_path):
  broken = tmp_path / "broken"
  # SIGKILL during a save. The first attempt almost always works.
  assert any(_kill_during_save(broken, fields) for _ in range(3))
  reached, saved = tiny_run.last_step(broken), _last_save(broken)
  assert saved >= reached - 2 * SAVE_EVERY

  step = _stop(broken, fields, signal.SIGHUP)
  if saved:
    resume = tiny_run.events(broken, "resume")[-1]
    assert resume["step"] == saved
    assert resume["lost_steps"] == reached - saved

  tiny_run.finish(tiny_run.start(broken, fields))
  assert tiny_run.events(broken, "resume")[-1]["step"] == step
  tiny_run.assert_same_run(unbroken, broken)


@pytest.mark.more
def test_a_signal_during_compilation_ends_the_run_at_once(fields, tmp_path):
  # Programs that no cache has, so that there is something to compile.
  process = tiny_run.start(tmp_path, fields | {"model.width": 24})
  tiny_run.wait_until(lambda: (tmp_path / "metrics.jsonl").exists(), process)
  process.send_signal(signal.SIGTERM)
  sent = time.monotonic()
  tiny_run.finish(process, status=-signal.SIGTERM)
  assert time.monotonic() - sent < 2
  assert not tiny_run.events(tmp_path, "ready")


def _check_ended(process):
  """One that was not killed finished, or was refused with one line."""
  out, err = tiny_run.kill(process)
  if process.returncode == 0:
    assert "finished at step" in out and "\ncost: " in out and not err
  else:
    assert process.returncode == 1 and err.count("\n") == 1, out + err
    assert "is in use by process" in err
    # Neither did it train, nor is it the one that it names.
    assert not out and f"process {process.pid} on" not in err


def _duel(rng, workdir, fields, kills):
  """Two processes at work on one folder, killed at random; kills left."""
  alive = []
  while kills:
    while len(alive) < 2:
      alive.append(tiny_run.start(workdir, fields))
      time.sleep(rng.uniform(0, 0.5))
    # At any moment: of a start, while one is refused, or of the training.
    time.sleep(rng.uniform(0, 3))
    for process in [p for p in alive if p.poll() is not None]:
      alive.remove(process)
      _check_ended(process)
      if process.returncode == 0:
        # What the other one does now is to find the run finished.
        for other in alive:
          other.wait(120)
          _check_ended(other)
        return kills
    if alive:
      victim = alive.pop(rng.randrange(len(alive)))
      print("kills", victim.pid, "at step", tiny_run.last_step(workdir))
      tiny_run.kill(victim)
      kills -= 1
  for process in alive:
    process.wait(120)
    _check_ended(process)
  return 0


@pytest.mark.slow
def test_two_writers_and_many_kills(fields, unbroken, tmp_path):
  seed, kills, rounds = random.randrange(2**32), 40, 0
  print("random seed", seed)
  rng = random.Random(seed)
  while kills:
    workdir = tmp_path / f"broken_{rounds}"
    kills = _duel(rng, workdir, fields, kills)
    tiny_run.finish(tiny_run.start(workdir, fields))
    tiny_run.assert_same_run(unbroken, workdir)
    rounds += 1
