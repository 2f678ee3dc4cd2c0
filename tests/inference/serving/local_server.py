# SPDX-License-Identifier: Apache-2.0
"""A real server in a thread, around a network whose text is known."""

import contextlib
import http.client
import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import uvicorn

from attnres_jax import config as config_lib
from attnres_jax.inference import engine as engine_lib
from attnres_jax.inference.serving import app as app_lib
from attnres_jax.inference.serving import connections as connections_lib
from tests import tiny_network

NAME, SLOTS, LENGTH, CHUNK, NUM_TOP = "tiny", 4, 512, 16, 3
# Greedy text repeats these characters of two, three and four bytes.
CIRCLE = "é✓𝄞"


def make_model(name="block_attnres"):
  """Any text may follow a letter, but the circle has only one next byte."""
  model = tiny_network.model(name, vocab_size=257, init_std=0.5)
  steps = list(CIRCLE.encode())
  table_VD = np.array(model.embedding.table[...])
  head_DV = np.array(model.embedding.head[...])
  for d, (byte, following) in enumerate(zip(steps, steps[1:] + steps[:1])):
    table_VD[byte] = 100.0 * np.eye(16)[d]
    head_DV[d] = 0.0
    head_DV[d, following] = 2.0
  model.embedding.table[...] = jnp.asarray(table_VD)
  model.embedding.head[...] = jnp.asarray(head_DV)
  return model


def make_engine(model):
  """All engines of these sizes share their programs."""
  return engine_lib.Engine(
    model, slots=SLOTS, length=LENGTH, chunk=CHUNK, num_top=NUM_TOP
  )


class Server:
  """A running server.

  Attributes:
    app: the application.
    port: where it listens.
  """

  def __init__(
    self,
    model,
    engine=None,
    *,
    connections=512,
    idle_seconds=20.0,
    api_key="",
    **limits,
  ):
    config = config_lib.load_config("configs/lm.py:runlocal")
    self.app = app_lib.App(
      engine or make_engine(model),
      config,
      NAME,
      limits=app_lib.Limits(**limits),
      hosts=("127.0.0.1",),
      api_key=api_key,
    )
    self._server = uvicorn.Server(
      uvicorn.Config(
        self.app.asgi,
        port=0,
        log_config=None,
        log_level="warning",
        ws="none",
        http=connections_lib.protocol(connections, idle_seconds),
        timeout_keep_alive=0,  # `idle_seconds` replaces it.
        timeout_graceful_shutdown=5,
      )
    )
    self._thread = threading.Thread(target=self._server.run)
    self._thread.start()
    until(lambda: self._server.started)
    listener = self._server.servers[0].sockets[0]
    self.port = listener.getsockname()[1]

  def close(self):
    self._server.should_exit = True
    self._thread.join(30)
    assert not self._thread.is_alive()

  def request(self, path, body=None, headers=None):
    """Sends a request; returns the connection and the response.

    Args:
      path: of the URL.
      body: for JSON; bytes are sent unchanged; None for GET.
      headers: in place of the usual ones.
    """
    connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
    if body is None:
      connection.request("GET", path, headers=headers or {})
    else:
      if not isinstance(body, bytes):
        body = json.dumps(body).encode()
      headers = headers or {"Content-Type": "application/json"}
      connection.request("POST", path, body, headers)
    return connection, connection.getresponse()

  def call(self, path, body=None, headers=None):
    """(status, object, headers) of a request."""
    connection, response = self.request(path, body, headers)
    with contextlib.closing(connection):
      return response.status, json.loads(response.read()), response.headers

  def complete(self, prompt, **fields):
    """The answer to a request, which has to succeed."""
    body = dict(prompt=prompt, temperature=0) | fields
    status, answer, _ = self.call("/v1/completions", body)
    assert status == 200, answer
    return answer

  def texts(self, prompt, **fields):
    choices = self.complete(prompt, **fields)["choices"]
    assert [choice["index"] for choice in choices] == [*range(len(choices))]
    return [choice["text"] for choice in choices]

  def stream(self, prompt, **fields):
    """(connection, events) of a stream; [DONE] is the last event."""
    body = dict(prompt=prompt, temperature=0, stream=True) | fields
    connection, response = self.request("/v1/completions", body)
    assert response.status == 200
    assert response.getheader("content-type").startswith("text/event-stream")
    return connection, _events(response)

  @property
  def running(self):
    """Texts in slots."""
    return len(self.app.service._running)

  @property
  def waiting(self):
    """Texts that wait for a slot."""
    return len(self.app.service._waiting)

  def is_idle(self):
    service = self.app.service
    return not (
      self.running
      or self.waiting
      or service._engine.busy
      or service._jobs
      or service._num_open
    )


def _events(response):
  """What a stream sends."""
  for line in response:
    if line := line.decode().rstrip("\n"):
      assert line.startswith("data: ")
      line = line.removeprefix("data: ")
      yield line if line == "[DONE]" else json.loads(line)


def until(condition, seconds=30.0):
  """Waits until it is true."""
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, "still not true"
    time.sleep(0.01)


def logprobs(model, ids):
  """By the whole forward pass, [T, V]."""
  apply = jax.jit(lambda model, tokens_BT: jax.nn.log_softmax(model(tokens_BT)))
  return np.asarray(apply(model, np.asarray([ids], np.int32))[0])
