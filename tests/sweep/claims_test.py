# SPDX-License-Identifier: Apache-2.0
"""A worker's claim of a run, and the state it keeps meanwhile."""

import os
import time

import pytest

from attnres_jax import claims as claims_lib
from attnres_jax import config as config_lib
from attnres_jax.sweep import claims
from attnres_jax.sweep import state as state_lib


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
  monkeypatch.setattr(claims_lib, "PATIENCE_SECONDS", 0.05)


def test_second_claim_is_refused_until_the_first_is_released(tmp_path):
  assert not claims.is_held(tmp_path)
  first = claims.acquire(tmp_path)
  assert claims.acquire(tmp_path) is None
  # Nor can anyone else, such as `attnres_jax.main`, have the folder.
  with pytest.raises(claims_lib.HeldError, match=f"process {os.getpid()} on"):
    claims_lib.acquire(tmp_path)
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


def test_a_folder_that_main_has_is_left_to_it(tmp_path):
  claim = claims_lib.acquire(tmp_path)
  assert claims.acquire(tmp_path) is None
  assert state_lib.read(tmp_path) == state_lib.State()
  claim.release()
  claims.acquire(tmp_path).release(state_lib.STOPPED)


def test_heartbeat_counts_the_time_of_all_attempts(tmp_path, monkeypatch):
  monkeypatch.setattr(claims_lib, "HEARTBEAT_SECONDS", 0.02)
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


def test_a_damaged_state_is_nobodys(tmp_path):
  (tmp_path / "state.json").write_text("{")
  with pytest.raises(config_lib.ConfigError, match="state.json:1: .*remove"):
    claims.acquire(tmp_path)
  assert not claims.is_held(tmp_path)
  assert (tmp_path / "state.json").read_text() == "{"
