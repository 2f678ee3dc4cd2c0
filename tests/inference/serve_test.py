# SPDX-License-Identifier: Apache-2.0
"""The command; what it serves has its own tests."""

from concurrent import futures
import contextlib
import http.client
import json
import os
import signal
import socket
import time

import pytest

from attnres_jax import config as config_lib
from attnres_jax.inference import engine as engine_lib
from attnres_jax.inference import serve
from attnres_jax.inference import trained
from tests import tiny_network


@pytest.fixture
def run(monkeypatch, tmp_path):
  """Runs the command on a tiny network; returns its status."""
  model = tiny_network.model(
    "prenorm", num_layers=1, vocab_size=257, init_std=0.5
  )
  config = config_lib.load_config("configs/lm.py:runlocal")
  monkeypatch.setattr(trained, "load", lambda options: (config, model))

  def run(*flags):
    return serve.main([f"--workdir={tmp_path}", *flags])

  return run


def _free_port():
  with socket.create_server(("127.0.0.1", 0)) as listener:
    return listener.getsockname()[1]


def _connect(port):
  """A connection, once the server answers; a context manager."""
  connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
  for _ in range(600):
    try:
      connection.request("GET", "/health")
      connection.getresponse().read()
      return contextlib.closing(connection)
    except OSError:
      connection.close()
      time.sleep(0.1)
  raise AssertionError("the server does not listen")


def _ask(connection, **fields):
  body = dict(prompt="a", past_end=True) | fields
  headers = {"Content-Type": "application/json"}
  connection.request("POST", "/v1/completions", json.dumps(body), headers)
  return connection.getresponse()


def test_a_signal_lets_running_texts_end(run, capsys, monkeypatch, tmp_path):
  step = engine_lib.Engine.step

  def slow_step(engine):
    time.sleep(0.02)
    return step(engine)

  monkeypatch.setattr(engine_lib.Engine, "step", slow_step)
  port = _free_port()

  def client():
    # A failure here must not leave the server running.
    try:
      with _connect(port) as connection:
        response = _ask(connection, model=tmp_path.name, max_tokens=1)
        assert response.status == 200
        response.read()
        response = _ask(connection, max_tokens=50, stream=True)
        first = response.readline()
        os.kill(os.getpid(), signal.SIGTERM)
        return first + response.read()
    except BaseException:
      os.kill(os.getpid(), signal.SIGTERM)
      raise

  before = signal.getsignal(signal.SIGTERM)
  with futures.ThreadPoolExecutor(1) as pool:
    found = pool.submit(client)
    assert run(f"--port={port}", "--slots=2", "--length=64") == 0
    lines = found.result().split()
  assert lines[-1] == b"[DONE]" and lines[-3].startswith(b'"length"')
  assert f"serving at http://127.0.0.1:{port}" in capsys.readouterr().err
  assert signal.getsignal(signal.SIGTERM) is before


def test_a_failed_engine_ends_the_server(run, capsys, monkeypatch):
  port = _free_port()

  def fail(engine):
    raise RuntimeError("out of memory")

  def client():
    try:
      with _connect(port) as connection:
        monkeypatch.setattr(engine_lib.Engine, "step", fail)
        return _ask(connection).status
    except BaseException:
      os.kill(os.getpid(), signal.SIGTERM)
      raise

  with futures.ThreadPoolExecutor(1) as pool:
    found = pool.submit(client)
    assert run(f"--port={port}", "--slots=2", "--length=64") == 1
    assert found.result() == 500
  error = capsys.readouterr().err
  assert error.endswith("error: the engine has failed: out of memory\n")


@pytest.mark.parametrize(
  "flags,message",
  [
    (["--port=70000"], "--port: got 70000, expected 0 to 65535"),
    (
      ["--host=0.0.0.0"],
      "--host: got '0.0.0.0', expected --api_key or $ATTNRES",
    ),
    (["--api_key=a b"], "--api_key: got 'a key', expected ASCII letters"),
    (["--queue=2000"], "--queue: got 2000, expected a number up to 1000"),
    (["--length=1"], "--length: got 1, expected at least 2"),
    (["--max_logprobs=300"], "--max_logprobs: got 300, expected 0 to 257"),
  ],
)
def test_bad_flags_are_named(run, flags, message, capsys):
  assert run(*flags) == 2
  error = capsys.readouterr().err
  assert message in error and error.count("\n") == 1


def test_a_missing_tokenizer_is_named_before_anything_is_compiled(
  run, capsys, monkeypatch
):
  def missing(*args):
    raise config_lib.ConfigError("config.data.tokenizer_path: got 'a.json'")

  monkeypatch.setattr(serve.text_format_lib, "of_data", missing)
  assert run(f"--port={_free_port()}") == 2
  error = capsys.readouterr().err
  assert "tokenizer_path" in error and "compiling" not in error


def test_a_port_that_is_taken(run, capsys):
  with socket.create_server(("127.0.0.1", 0)) as listener:
    port = listener.getsockname()[1]
    assert run(f"--port={port}") == 2
  assert "Address already in use" in capsys.readouterr().err
