# SPDX-License-Identifier: Apache-2.0
"""What a server does when clients, requests or its engine misbehave."""

import contextlib
import http.client
import socket
import time

import pytest

from tests.inference.serving import local_server

LENGTH, SLOTS = local_server.LENGTH, local_server.SLOTS
# Text that lasts long and never ends by itself.
LONG = dict(prompt="é", max_tokens=LENGTH - 8, past_end=True, temperature=0)


@pytest.fixture
def start(model):
  """Starts servers whose engine is slow, with other limits."""
  with contextlib.ExitStack() as stack:

    def start(seconds=0.02, **limits):
      engine = local_server.make_engine(model)
      step = engine.step

      def slow_step():
        time.sleep(seconds)
        return step()

      engine.step = slow_step
      server = local_server.Server(model, engine, **limits)
      stack.callback(server.close)
      return server

    yield start


def _busy(server, count=SLOTS):
  """Streams that fill slots; closing the stack ends them."""
  stack = contextlib.ExitStack()
  for _ in range(count):
    connection, events = server.stream(**LONG)
    stack.callback(connection.close)
    next(events)
  return stack


def test_a_client_that_leaves_a_stream_frees_its_slot(start):
  server = start()
  connection, events = server.stream(**LONG)
  next(events)
  assert server.running == 1
  begin = time.monotonic()
  connection.close()
  local_server.until(server.is_idle)
  assert time.monotonic() - begin < 0.02 * LENGTH / 2


def test_a_client_that_leaves_before_its_answer_frees_its_slot(start):
  server = start()
  with _sent(server, dict(LONG, n=2)):
    local_server.until(lambda: server.running == 2)
  local_server.until(server.is_idle)


def test_a_client_that_leaves_the_queue_frees_its_place(start):
  server = start(queue=1)
  with _busy(server):
    for _ in range(3):
      with _sent(server, LONG):
        _waiting(server, 1)
      _waiting(server, 0)
    assert server.running == SLOTS
  local_server.until(server.is_idle)


def _sent(server, body):
  """A connection with a request; closing it does not wait for an answer."""
  connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
  headers = {"Content-Type": "application/json"}
  data = local_server.json.dumps(body).encode()
  connection.request("POST", "/v1/completions", data, headers)
  return contextlib.closing(connection)


def _waiting(server, count):
  local_server.until(lambda: server.waiting == count)


def test_a_full_queue_refuses(start):
  server = start(queue=1)
  with _busy(server), _sent(server, LONG):
    _waiting(server, 1)
    status, answer, headers = server.call("/v1/completions", LONG)
    assert status == 429 and headers["retry-after"] == "1"
    assert answer["error"]["code"] == "queue_full"
    assert answer["error"]["type"] == "rate_limit_error"
  local_server.until(server.is_idle)
  # More texts than one request may have are another error.
  body = dict(LONG, prompt=["a"] * (SLOTS + 2))
  status, answer, _ = server.call("/v1/completions", body)
  assert status == 400 and answer["error"]["param"] == "prompt"
  assert f"at most {SLOTS}, by" in answer["error"]["message"]


def test_waiting_too_long_for_a_slot(start):
  server = start(wait_seconds=0.3)
  with _busy(server):
    begin = time.monotonic()
    status, answer, headers = server.call(
      "/v1/completions", dict(LONG, stream=True)
    )
    assert 0.3 <= time.monotonic() - begin < 5
    assert status == 503 and headers["retry-after"] == "1"
    assert answer["error"]["code"] == "slot_timeout"
    _waiting(server, 0)
  local_server.until(server.is_idle)


def test_taking_too_long(start):
  server = start(request_seconds=0.5)
  status, answer, _ = server.call("/v1/completions", LONG)
  assert status == 504 and answer["error"]["code"] == "timeout"
  connection, events = server.stream(**LONG)
  with contextlib.closing(connection):
    *_, last = events
  assert last["error"]["code"] == "timeout"
  local_server.until(server.is_idle)


def test_a_client_that_reads_nothing(start):
  """The text is drawn into the queue of its job, and its slot is free."""
  server = start(seconds=0)
  with socket.create_connection(("127.0.0.1", server.port)) as connection:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    body = local_server.json.dumps(dict(LONG, stream=True, logprobs=3))
    head = (
      "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
      f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall((head + body).encode())
    local_server.until(lambda: server.running)
    local_server.until(lambda: not server.running)
  local_server.until(server.is_idle)


def test_a_failed_engine_answers_everybody(start):
  server = start(queue=1)
  with _busy(server, SLOTS - 1):
    connection, events = server.stream(**LONG)
    with contextlib.closing(connection), _sent(server, LONG) as waiting:
      next(events)

      def fail():
        raise RuntimeError("out of memory")

      server.app.service._engine.step = fail
      *_, last = events
      assert last["error"]["code"] == "engine_failed"
      assert waiting.getresponse().status == 500
  assert server.call("/v1/completions", LONG)[0] == 500
  assert server.call("/health")[0] == 503
  assert str(server.app.service.failure) == "out of memory"
  local_server.until(lambda: not server.app.service._jobs)


def test_a_forced_exit_ends_the_engine(start):
  """As after a second Ctrl-C, while a text is drawn."""
  server = start()
  with _busy(server, 1):
    server._server.force_exit = True
    server.close()
  assert not server.app.service._thread.is_alive()


@pytest.mark.parametrize(
  "body,status,param",
  [
    (b"", 400, None),
    (b"[1]", 400, None),
    (b'{"prompt": "\xff"}', 400, None),
    (b"[" * 100_000, 400, None),
    (b"x" * (2**20 + 1), 413, None),
    (b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
    (dict(), 400, "prompt"),
    (dict(prompt=[]), 400, "prompt"),
    (dict(prompt=[1, "a"]), 400, "prompt"),
    (dict(prompt=[True]), 400, "prompt"),
    (dict(prompt=[257]), 400, "prompt"),
    (dict(prompt=[2**200]), 400, "prompt"),
    (dict(prompt=["a"] * 90), 400, "prompt"),
    (dict(prompt="a" * 600), 400, "prompt"),
    (dict(max_tokens=0), 400, "max_tokens"),
    (dict(max_tokens=512), 400, "max_tokens"),
    (dict(max_tokens="9"), 400, "max_tokens"),
    (dict(temperature=101), 400, "temperature"),
    (dict(temperature=True), 400, "temperature"),
    (dict(top_p=1.5), 400, "top_p"),
    (dict(top_k=2**31), 400, "top_k"),
    (dict(seed=-1), 400, "seed"),
    (dict(n=1000), 400, "n"),
    (dict(n=100), 400, "n"),
    (dict(logprobs=4), 400, "logprobs"),
    (dict(stream=True, stream_options=dict(a=1)), 400, "stream_options"),
    (dict(stop=["a"] * 17), 400, "stop"),
    (dict(stop=""), 400, "stop"),
    (dict(presence_penalty=0.5), 400, "presence_penalty"),
    (dict(suffix="a"), 400, "suffix"),
  ],
  ids=lambda value: repr(value)[:30],
)
def test_what_is_refused_is_named(server, body, status, param):
  if isinstance(body, dict):
    body = dict(prompt="a") | body if body else body
  found, answer, _ = server.call("/v1/completions", body)
  error = answer["error"]
  assert (found, error["param"]) == (status, param), error
  assert error["type"] == "invalid_request_error"
  assert len(error["message"]) < 500


def test_what_is_accepted_and_means_nothing(server):
  fields = dict(user="me", suffix=None, presence_penalty=0.0, n=None)
  text = server.texts("a", temperature=0, max_tokens=3)
  assert server.texts("a", temperature=0, max_tokens=3, **fields) == text
  # The start of a document is a prompt.
  assert server.complete("")["usage"]["prompt_tokens"] == 1


def test_other_models_urls_methods_and_hosts(server):
  status, answer, _ = server.call(
    "/v1/completions", dict(prompt="a", model="gpt-4")
  )
  assert status == 404 and answer["error"]["param"] == "model"
  assert answer["error"]["code"] == "model_not_found"
  status, answer, _ = server.call("/v1/embeddings", dict(model="gpt-4"))
  assert status == 404 and "/v1/embeddings" in answer["error"]["message"]
  status, answer, _ = server.call("/v1/completions")
  assert status == 405 and "GET" in answer["error"]["message"]
  status, answer, _ = server.call(
    "/v1/completions", b"{}", {"Content-Type": "a"}
  )
  assert status == 415 and "application/json" in answer["error"]["message"]
  connection, response = server.request("/", headers={"Host": "evil.example"})
  with contextlib.closing(connection):
    assert response.status == 400
