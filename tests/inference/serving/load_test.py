# SPDX-License-Identifier: Apache-2.0
"""Five minutes of 200 clients on 8 slots; some leave, some ask for nonsense."""

import collections
from concurrent import futures
import contextlib
import http.client
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import tiny_run

CLIENTS, SLOTS, QUEUE = 200, 8, 128
SECONDS = float(os.environ.get("ATTNRES_LOAD_SECONDS", "300"))
# What a client does, and the statuses that it may get for it.
BUSY = {429, 503}
KINDS = {
  "whole": {200} | BUSY,
  "stream": {200} | BUSY,
  "leaves": {200} | BUSY,
  "too long": {400},
  "not JSON": {400},
}


@pytest.fixture
def server(tmp_path):
  """The port and the process of a server of a network that was trained."""
  fields = tiny_run.corpus(tmp_path) | {"train.steps": 10, "mesh.data": 1}
  tiny_run.train_here(tmp_path / "run", fields)
  with socket.create_server(("127.0.0.1", 0)) as listener:
    port = listener.getsockname()[1]
  command = [
    sys.executable, "-m", "attnres_jax.inference.serve",
    f"--workdir={tmp_path / 'run'}", f"--port={port}", f"--slots={SLOTS}",
    f"--queue={QUEUE}", "--length=256", "--chunk=64",
  ]  # fmt: skip
  process = subprocess.Popen(
    command, cwd=tiny_run.ROOT, env=tiny_run.environment()
  )
  try:
    yield port, process
  finally:
    process.kill()
    process.wait()


def _ask(port, rng, kind):
  """(status, seconds to the first byte, seconds) of a request."""
  prompt = "depth " * rng.randrange(1, 20) + rng.choice("abcdefgh")
  body = dict(prompt=prompt, max_tokens=rng.randrange(1, 60), logprobs=2)
  body["echo"] = rng.random() < 0.2
  body["stream"] = kind in ("stream", "leaves")
  if kind == "too long":
    body["prompt"] = "x" * 1000
  data = b"{" if kind == "not JSON" else json.dumps(body).encode()
  headers = {"Content-Type": "application/json"}
  connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
  with contextlib.closing(connection):
    begin = time.monotonic()
    connection.request("POST", "/v1/completions", data, headers)
    response = connection.getresponse()
    response.read(1)
    first = time.monotonic() - begin
    if kind != "leaves":
      rest = response.read()
      if kind == "stream" and response.status == 200:
        assert rest.endswith(b"data: [DONE]\n\n")
  return response.status, first, time.monotonic() - begin


def _client(port, seed, end):
  rng, found = random.Random(seed), []
  while time.monotonic() < end:
    kind = rng.choices(list(KINDS), [8, 8, 3, 1, 1])[0]
    status, *seconds = _ask(port, rng, kind)
    found.append((kind, status, *seconds))
    if status in BUSY:
      time.sleep(rng.uniform(0.5, 1.5))
  return found


def _get(port, path):
  connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
  with contextlib.closing(connection):
    connection.request("GET", path)
    return connection.getresponse().read().decode()


def _mib(process):
  """Resident memory of the server."""
  pages = pathlib.Path(f"/proc/{process.pid}/statm").read_text().split()[1]
  return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _wait_for(port):
  for _ in range(600):
    with contextlib.suppress(OSError):
      return _get(port, "/health")
    time.sleep(0.2)
  raise AssertionError("the server does not answer")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_many_clients_for_long(server):
  port, process = server
  _wait_for(port)
  begin = time.monotonic()
  memory = []
  with futures.ThreadPoolExecutor(CLIENTS) as pool:
    clients = [
      pool.submit(_client, port, seed, begin + SECONDS)
      for seed in range(CLIENTS)
    ]
    while time.monotonic() < begin + SECONDS:
      memory.append(_mib(process))
      time.sleep(1)
    found = [row for client in clients for row in client.result()]
  counts = collections.Counter((kind, status) for kind, status, *_ in found)
  served = np.asarray([row[2:] for row in found if row[1] == 200])
  quarter = len(memory) // 4
  print(f"\n{len(found)} requests in {SECONDS:g} s: {sorted(counts.items())}")
  for name, column in zip(("first byte", "whole"), served.T):
    places = np.percentile(column, [50, 90, 99, 100])
    print(f"{name}, seconds at 50, 90, 99, 100 %:", places.round(3))
  print("MiB over time:", np.asarray(memory)[:: max(quarter // 3, 1)].round())
  for kind, status in counts:
    assert status in KINDS[kind], (kind, status)
  assert counts["whole", 200] > CLIENTS and counts["stream", 200] > CLIENTS
  # The first quarter compiles.
  settled = np.max(memory[quarter : 2 * quarter])
  assert np.max(memory[-quarter:]) < settled + 16
  for _ in range(100):
    lines = _get(port, "/metrics").splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line[:1] != "#")
    idle = [values[f"attnres_{n}"] for n in ("slots_in_use", "queue_length")]
    if idle == ["0.0", "0.0"]:
      break
    time.sleep(0.1)
  assert idle == ["0.0", "0.0"]
