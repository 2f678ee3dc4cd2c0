# SPDX-License-Identifier: Apache-2.0
"""One worker per run: locks on disks, leases in object stores."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest

from attnres_jax import files
from attnres_jax.sweep import claims
from attnres_jax.sweep import exits
from attnres_jax.sweep import state as state_lib
from tests import tiny_run

_HOLDER = """
import sys, time
from attnres_jax.sweep import claims
claim = claims.acquire(sys.argv[1])
print("held" if claim else "refused", flush=True)
time.sleep(600)
"""


@pytest.fixture
def leases(monkeypatch):
  """A disk that is treated as an object store."""
  monkeypatch.setattr(files, "is_remote", lambda path: True)
  monkeypatch.setattr(claims, "SETTLE_SECONDS", 0.0)


def test_second_claim_is_refused_until_the_first_is_released(tmp_path):
  assert not claims.is_held(tmp_path)
  first = claims.acquire(tmp_path)
  assert claims.acquire(tmp_path) is None
  assert claims.is_held(tmp_path)
  assert state_lib.read(tmp_path).status == "running"
  assert state_lib.read(tmp_path).pid == os.getpid()
  first.release(state_lib.FAILED, "a cause")
  assert not claims.is_held(tmp_path)
  assert state_lib.read(tmp_path).error == "a cause"
  second = claims.acquire(tmp_path)
  state = state_lib.read(tmp_path)
  assert (state.status, state.attempts, state.error) == ("running", 2, "")
  second.release(state_lib.DONE)
  # What is done is never claimed again.
  assert claims.acquire(tmp_path) is None
  assert not claims.is_held(tmp_path)
  assert state_lib.read(tmp_path).status == "done"


def test_a_killed_holder_leaves_nothing_behind(tmp_path):
  process = subprocess.Popen(
    [sys.executable, "-c", _HOLDER, str(tmp_path)],
    stdout=subprocess.PIPE,
    text=True,
    env=tiny_run.environment(),
  )
  try:
    assert process.stdout.readline() == "held\n"
    assert claims.is_held(tmp_path)
    assert claims.acquire(tmp_path) is None
    state = state_lib.read(tmp_path)
    assert state.pid == process.pid and state.is_alive()
    process.send_signal(signal.SIGKILL)
    process.wait()
  finally:
    process.kill()
    process.communicate()
  assert not claims.is_held(tmp_path)
  claim = claims.acquire(tmp_path)
  assert state_lib.read(tmp_path).attempts == 2
  claim.release(state_lib.STOPPED)


def test_heartbeat_counts_the_time_of_all_attempts(tmp_path, monkeypatch):
  monkeypatch.setattr(state_lib, "HEARTBEAT_SECONDS", 0.02)
  state_lib.write(tmp_path, state_lib.State(attempts=3, seconds=1000.0))
  claim = claims.acquire(tmp_path)
  first = state_lib.read(tmp_path)
  deadline = time.monotonic() + 30
  while state_lib.read(tmp_path).heartbeat == first.heartbeat:
    assert time.monotonic() < deadline
    time.sleep(0.01)
  state = state_lib.read(tmp_path)
  assert state.seconds - 1000.0 == pytest.approx(
    state.heartbeat - state.started, abs=1e-5
  )
  assert state.attempts == 4
  claim.release(state_lib.STOPPED)


def test_a_lease_holds_while_it_beats(tmp_path, leases):
  claim = claims.acquire(tmp_path)
  assert not (tmp_path / claims.LOCK).exists()
  assert claims.acquire(tmp_path) is None
  old = state_lib.read(tmp_path)
  late = dataclasses.replace(
    old, heartbeat=old.heartbeat - state_lib.LEASE_SECONDS - 1
  )
  state_lib.write(tmp_path, late)
  assert not claims.is_held(tmp_path)
  other = claims.acquire(tmp_path)
  assert state_lib.read(tmp_path).token not in ("", old.token)
  for one in (claim, other):
    one.release(state_lib.STOPPED)


def test_of_two_leases_at_once_the_last_one_counts(
  tmp_path, leases, monkeypatch
):
  # Another worker's claim lands while this one waits.
  other = state_lib.State(
    status=state_lib.RUNNING, token="other", heartbeat=time.time()
  )
  monkeypatch.setattr(
    claims.time, "sleep", lambda _: state_lib.write(tmp_path, other)
  )
  assert claims.acquire(tmp_path) is None
  assert state_lib.read(tmp_path) == other


def test_a_worker_without_its_lease_ends_on_the_spot(tmp_path):
  program = """
import sys, time
from attnres_jax import files
from attnres_jax.sweep import claims, state
files.is_remote = lambda path: True
claims.SETTLE_SECONDS = 0.0
state.HEARTBEAT_SECONDS = 0.05
claim = claims.acquire(sys.argv[1])
state.write(sys.argv[1], state.State(status="running", token="other"))
time.sleep(60)
"""
  process = subprocess.run(
    [sys.executable, "-c", program, str(tmp_path)],
    capture_output=True,
    text=True,
    env=tiny_run.environment(),
    timeout=120,
  )
  assert process.returncode == exits.Exit.BUSY
  assert "another worker has taken this run" in process.stderr
  assert state_lib.read(tmp_path).token == "other"


def test_a_state_that_cannot_be_read_says_where_it_is(tmp_path):
  (tmp_path / "state.json").write_text("{")
  with pytest.raises(ValueError, match="state.json: not the state of a run"):
    state_lib.read(tmp_path)
