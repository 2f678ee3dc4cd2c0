# SPDX-License-Identifier: Apache-2.0
"""One writer per run folder on disks; `bucket_claims_test` has stores."""

import dataclasses
import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from attnres_jax.common import exits
from attnres_jax.common import stores
from attnres_jax.train import claims
from tests import tiny_run

_HOLDER = """
import sys, time
from attnres_jax.train import claims
claim = claims.acquire(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def no_locks(monkeypatch):
  """A network disk without locks, which has leases instead."""

  def flock(file, kind):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(fcntl, "flock", flock)


@pytest.fixture
def nfs(monkeypatch):
  """A network disk, which compares a lock with how its file is opened."""
  real = fcntl.flock
  wrong = {os.O_WRONLY: fcntl.LOCK_SH, os.O_RDONLY: fcntl.LOCK_EX}

  def flock(file, kind):
    opened = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
    if kind & wrong.get(opened, 0):
      raise OSError(errno.EBADF, "Bad file descriptor")
    real(file, kind)

  monkeypatch.setattr(fcntl, "flock", flock)


@pytest.fixture(params=["disk", "nfs", "no_locks"])
def place(request, tmp_path):
  """A folder of each kind, which does not exist yet."""
  if request.param != "disk":
    request.getfixturevalue(request.param)
  return tmp_path / "run"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
  monkeypatch.setattr(claims, "PATIENCE_SECONDS", 0.05)


def _state(folder):
  return {
    path: (path.read_bytes(), path.stat().st_mtime_ns)
    for path in folder.iterdir()
  }


def test_second_claim_is_refused_until_the_first_is_released(place):
  assert not claims.is_held(place)
  for _ in range(2):
    claim = claims.acquire(place)
    assert claims.is_held(place)
    before = _state(place)
    with pytest.raises(claims.HeldError) as refused:
      claims.acquire(place)
    assert _state(place) == before
    assert exits.of_error(refused.value) == exits.Exit.AGAIN
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


def test_a_start_that_is_refused_leaves_no_folder(tmp_path, monkeypatch):
  run, flock = tmp_path / "run", fcntl.flock
  with pytest.raises(RuntimeError, match="refused"), claims.held(run):
    raise RuntimeError("refused")
  assert not list(tmp_path.iterdir())

  def late(file, kind):
    """Locks a file that a refused start has removed since it was opened."""
    shutil.rmtree(run)
    flock(file, kind)

  monkeypatch.setattr(fcntl, "flock", late)
  with pytest.raises(claims.HeldError):
    claims.acquire(run)
  monkeypatch.undo()
  with claims.held(run):
    (run / "config.json").touch()
  assert (run / "lock").exists()


@pytest.mark.more
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


@pytest.mark.parametrize("held", [False, True])
def test_who_may_only_read_sees_whether_it_is_held(tmp_path, monkeypatch, held):
  claim = claims.acquire(tmp_path)
  if not held:
    claim.release()
  real = open

  def open_to_read(path, mode="r", **options):
    if mode != "r":
      raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return real(path, mode, **options)

  monkeypatch.setattr("builtins.open", open_to_read)
  assert claims.is_held(tmp_path) == held
  monkeypatch.undo()
  claim.release()


def test_of_two_with_one_pid_one_creates_a_file(tmp_path, monkeypatch):
  """Containers that share a network disk may have the same process number."""
  path, link = tmp_path / "lease", os.link

  def late(temporary, target):
    monkeypatch.setattr(os, "link", link)
    assert stores.create(path, b"other")
    link(temporary, target)

  monkeypatch.setattr(os, "link", late)
  assert not stores.create(path, b"mine!")
  assert path.read_bytes() == b"other"


def test_a_heartbeat_leaves_no_moment_without_a_lease(tmp_path):
  """Whoever reads half of a lease would take the folder."""
  path = tmp_path / "lease"
  stores.write(path, b"old")
  with open(path, "rb") as opened:
    stores.write(path, b"new")
    assert opened.read() == b"old"
  assert path.read_bytes() == b"new"
  assert os.listdir(tmp_path) == ["lease"]


def test_a_full_disk_keeps_a_lock_all_the_same(tmp_path, monkeypatch):
  def write(*args):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(os, "write", write)
  claim = claims.acquire(tmp_path)
  with pytest.raises(claims.HeldError, match="in use by another process"):
    claims.acquire(tmp_path)
  claim.release()


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("patience", [0.0, 180.0])
@pytest.mark.parametrize("ahead", [-3600, 0, 3600])
@pytest.mark.parametrize("alive", [True, False])
def test_clocks_of_other_hosts_do_not_count(
  alive, ahead, patience, tmp_path, monkeypatch
):
  """A lease ends when its heartbeat stands still for whoever waits."""
  now, beats = [0.0], [0]

  def stamp():
    return 1e9 + now[0] + ahead

  other = claims.Holder("elsewhere", 7, "other", 1.0, stamp())
  path = claims._lease(claims.epath.Path(tmp_path), 3)
  stores.write(path, claims._bytes(other))

  def sleep(seconds):
    now[0] += max(seconds, 1e-3)
    if alive and now[0] // claims.HEARTBEAT_SECONDS > beats[0]:
      beats[0] += 1
      beat = dataclasses.replace(other, heartbeat=stamp())
      stores.write(path, claims._bytes(beat))

  monkeypatch.setattr(claims.time, "sleep", sleep)
  monkeypatch.setattr(claims.time, "monotonic", lambda: now[0])
  monkeypatch.setattr(claims.time, "time", lambda: 1e9 + now[0])
  patient = patience > claims.LEASE_SECONDS or ahead
  if alive or not patient:
    with pytest.raises(claims.HeldError, match="process 7 on elsewhere"):
      claims.acquire(tmp_path, patience_seconds=patience)
    assert claims._leases(tmp_path) == [3]
  else:
    number, _ = claims._take_lease(
      claims.epath.Path(tmp_path), dataclasses.replace(other, pid=8), patience
    )
    assert number == 4 and claims.LEASE_SECONDS <= now[0] < 100
