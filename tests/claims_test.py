# SPDX-License-Identifier: Apache-2.0
"""One writer per run folder: locks on disks, leases in object stores."""

import dataclasses
import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from attnres_jax import claims
from attnres_jax import config as config_lib
from attnres_jax import files
from tests import tiny_run

_HOLDER = """
import sys, time
from attnres_jax import claims
claim = claims.acquire(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def leases(monkeypatch):
  """A disk that is treated as an object store."""
  monkeypatch.setattr(files, "is_remote", lambda path: True)
  monkeypatch.setattr(claims, "SETTLE_SECONDS", 0.0)


@pytest.fixture
def no_locks(monkeypatch):
  """A network disk without locks."""

  def flock(file, kind):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(fcntl, "flock", flock)
  monkeypatch.setattr(claims, "SETTLE_SECONDS", 0.0)


@pytest.fixture(params=["disk", "leases", "no_locks"])
def place(request, tmp_path):
  """A folder of each kind, which does not exist yet."""
  if request.param != "disk":
    request.getfixturevalue(request.param)
  return tmp_path / "run"


def _holder(workdir):
  return json.loads((workdir / claims.LOCK).read_text())


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
  monkeypatch.setattr(claims, "PATIENCE_SECONDS", 0.05)


def test_second_claim_is_refused_until_the_first_is_released(place):
  assert not claims.is_held(place)
  for _ in range(2):
    claim = claims.acquire(place)
    assert claims.is_held(place)
    assert _holder(place)["pid"] == os.getpid()
    with pytest.raises(claims.HeldError) as refused:
      claims.acquire(place)
    line = str(refused.value)
    assert "\n" not in line and str(place) in line
    assert f"process {os.getpid()} on {socket.gethostname()}, started" in line
    claim.release()
    assert not claims.is_held(place)


def test_a_claim_that_is_handed_in_stays_its_owners(place):
  claim = claims.acquire(place)
  with claims.held(place, claim):
    assert claims.is_held(place)
  assert claims.is_held(place)
  claim.release()
  with claims.held(place):
    with pytest.raises(claims.HeldError):
      claims.acquire(place)
  assert not claims.is_held(place)


def test_a_refused_claim_touches_nothing(place):
  claim = claims.acquire(place)
  before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in place.iterdir()}
  with pytest.raises(claims.HeldError):
    claims.acquire(place)
  assert before == {
    p: (p.read_bytes(), p.stat().st_mtime_ns) for p in place.iterdir()
  }
  claim.release()


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
    with pytest.raises(claims.HeldError, match=f"process {process.pid} on"):
      claims.acquire(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
  finally:
    process.kill()
    process.communicate()
  assert not claims.is_held(tmp_path)
  claims.acquire(tmp_path).release()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(config_lib.ConfigError) as error:
    with claims.held(tmp_path / "file" / "run"):
      raise AssertionError("not held")
  line = str(error.value)
  assert re.match(r"--workdir: got '.*/file/run', expected a folder", line)
  assert "\n" not in line


def test_a_full_disk_keeps_a_lock_all_the_same(tmp_path, monkeypatch):
  def write(*args):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(os, "write", write)
  claim = claims.acquire(tmp_path)
  with pytest.raises(claims.HeldError, match="in use by another process"):
    claims.acquire(tmp_path)
  claim.release()


def test_a_lease_holds_while_it_beats(tmp_path, leases, monkeypatch):
  claim = claims.acquire(tmp_path)
  first = claims._read(tmp_path)
  with pytest.raises(claims.HeldError):
    claims.acquire(tmp_path)
  late = first.heartbeat - claims.LEASE_SECONDS - 1
  claims._write(tmp_path, dataclasses.replace(first, heartbeat=late))
  assert not claims.is_held(tmp_path)
  other = claims.acquire(tmp_path)
  assert claims._read(tmp_path).token == other.holder.token
  # The one that lost it leaves the file to the other.
  claim.release()
  assert claims.is_held(tmp_path)
  other.release()
  assert not claims.is_held(tmp_path)


@pytest.mark.parametrize("alive", [True, False])
def test_whoever_waits_for_a_lease_sees_whether_its_holder_lives(
  tmp_path, leases, monkeypatch, alive
):
  now = time.time()
  other = claims.Holder("elsewhere", 7, "other", now, now)
  claims._write(tmp_path, other)
  waited = []

  def sleep(seconds):
    waited.append(seconds)
    if seconds and alive:
      beat = dataclasses.replace(other, heartbeat=now + 1)
      claims._write(tmp_path, beat)
    elif seconds:
      dead = now + claims.LEASE_SECONDS + 1
      monkeypatch.setattr(claims.time, "time", lambda: dead)

  monkeypatch.setattr(claims.time, "sleep", sleep)
  if alive:
    with pytest.raises(claims.HeldError, match="process 7 on elsewhere"):
      claims.acquire(tmp_path, patience_seconds=1000)
  else:
    claims.acquire(tmp_path, patience_seconds=1000).release()
  assert waited[0] == claims.HEARTBEAT_SECONDS


def test_of_two_leases_at_once_the_last_one_counts(
  tmp_path, leases, monkeypatch
):
  # Another writer's claim arrives while this one waits.
  now = time.time()
  other = claims.Holder("elsewhere", 7, "other", now, now)
  monkeypatch.setattr(
    claims.time, "sleep", lambda _: claims._write(tmp_path, other)
  )
  with pytest.raises(claims.HeldError, match="process 7 on elsewhere"):
    claims.acquire(tmp_path)
  assert claims._read(tmp_path) == other


def test_a_writer_without_its_lease_ends_on_the_spot(tmp_path):
  program = """
import sys, time
from attnres_jax import claims, files
files.is_remote = lambda path: True
claims.SETTLE_SECONDS = 0.0
claims.HEARTBEAT_SECONDS = 0.05
claim = claims.acquire(sys.argv[1], lost_status=3)
claims._write(claims.epath.Path(sys.argv[1]), claims.Holder("", 7, "o", 0, 0))
time.sleep(60)
"""
  process = subprocess.run(
    [sys.executable, "-c", program, str(tmp_path)],
    capture_output=True,
    text=True,
    env=tiny_run.environment(),
    timeout=120,
  )
  assert process.returncode == 3
  assert "another process has taken this run" in process.stderr
  assert _holder(tmp_path)["token"] == "o"
