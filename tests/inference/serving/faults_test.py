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
  assert server.metrics()["attnres_slots_in_use"] == 1
  connection.close()
  local_server.until(server.is_idle)
  local_server.until(lambda: server.answered(499) == 1)
  assert server.metrics()["attnres_completion_tokens_total"] < LENGTH / 2


def test_a_client_that_leaves_before_its_answer_frees_its_slot(start):
  server = start()
  with _sent(server, dict(LONG, n=2)):
    local_server.until(lambda: server.metrics()["attnres_slots_in_use"] == 2)
  local_server.until(server.is_idle)
  local_server.until(lambda: server.answered(499) == 1)


def test_a_client_that_leaves_the_queue_frees_its_place(start):
  server = start(queue=1)
  with _busy(server):
    for _ in range(3):
      with _sent(server, LONG):
        _waiting(server, 1)
      _waiting(server, 0)
    assert server.metrics()["attnres_slots_in_use"] == SLOTS
  local_server.until(server.is_idle)
  local_server.until(lambda: server.answered(499) == 3 + SLOTS)


def test_a_client_that_leaves_within_its_body(server):
  before = server.answered(499)
  with _sent(server, LONG, promised=10**5):
    pass
  local_server.until(lambda: server.answered(499) == before + 1)


def _sent(server, body, promised=0):
  """A connection with a request; closing it does not wait for an answer."""
  connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
  headers = {"Content-Type": "application/json"}
  data = local_server.json.dumps(body).encode()
  if promised:
    headers["Content-Length"] = str(promised)
  connection.request("POST", "/v1/completions", data, headers)
  return contextlib.closing(connection)


def _waiting(server, count):
  local_server.until(lambda: server.metrics()["attnres_queue_length"] == count)


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
  local_server.until(lambda: server.answered(504) == 2)


def test_a_client_that_reads_nothing(start):
  """The text is drawn into the queue of its job, and its slot is free."""
  server = start(seconds=0, request_seconds=1.0)
  with socket.create_connection(("127.0.0.1", server.port)) as connection:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    body = local_server.json.dumps(dict(LONG, stream=True, logprobs=3))
    head = (
      "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
      f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall((head + body).encode())
    local_server.until(lambda: server.app.service._jobs)
    local_server.until(server.is_idle)


def test_a_stop_lets_texts_end_and_refuses_others(start):
  server = start(seconds=0.01)
  fields = dict(LONG, max_tokens=40)
  connection, events = server.stream(**fields)
  with contextlib.closing(connection), _busy(server, SLOTS - 1):
    next(events)
    waiting = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(waiting):
      waiting.request(
        "POST",
        "/v1/completions",
        local_server.json.dumps(LONG),
        {"Content-Type": "application/json"},
      )
      _waiting(server, 1)
      server.loop.call_soon_threadsafe(server.app.service.drain)
      response = waiting.getresponse()
      assert response.status == 503
      answer = local_server.json.loads(response.read())
      assert answer["error"]["code"] == "stopping"
    assert server.call("/v1/completions", LONG)[0] == 503
    *_, last, done = events
    assert done == "[DONE]" and last["choices"][0]["finish_reason"] == "length"


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


BAD_BODIES = {
  b"": (400, None, "Invalid JSON"),
  b"{": (400, None, "Invalid JSON"),
  b"[1]": (400, None, "got [1], expected an object"),
  b'{"prompt": "\xff"}': (400, None, "invalid unicode"),
  b'{"temperature": NaN}': (
    400,
    "temperature",
    "got NaN, expected a number from 0",
  ),
  b'{"seed": ' + b"1" * 5000 + b"}": (400, None, "Invalid JSON"),
  b"[" * 100_000: (400, None, "recursion limit"),
  b"x" * (2**20 + 1): (413, None, "more than 1048576 bytes"),
  b'{"prompt": "\\ud800"}': (400, None, "Invalid JSON"),
}


@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: repr(body[:20]))
def test_bad_bodies(server, body):
  status, param, words = BAD_BODIES[body]
  _refuses(server, body, status, param, words)


@pytest.mark.parametrize(
  "fields,param,words",
  [
    ({}, "prompt", "got null, expected a text, a list of ids"),
    (dict(prompt=[]), "prompt", "not empty"),
    (dict(prompt=[[]]), "prompt", "a list of ids, or a list of either"),
    (dict(prompt=[1, "a"]), "prompt", "expected a text, a list of ids"),
    (dict(prompt=[True]), "prompt", "expected a text, a list of ids"),
    (dict(prompt=[1.5]), "prompt", "got 1.5, expected a text, a list of ids"),
    (dict(prompt=5), "prompt", "got 5"),
    (dict(prompt=[257]), "prompt", "got 257, expected ids below 257"),
    (dict(prompt=[2**63]), "prompt", "expected ids below 257"),
    (dict(prompt=[2**200]), "prompt", "expected ids below 257"),
    (dict(top_k=2**31), "top_k", "a number from 0 to 2147483647"),
    (dict(seed=2**32), "seed", "a number from 0 to 4294967295"),
    (dict(temperature=101), "temperature", "a number from 0 to 100"),
    (dict(temperature=1e400), "temperature", "from 0 to 100"),
    (dict(repetition_penalty=3e-38), "repetition_penalty", "from 0.01 to 100"),
    (dict(prompt=["a"] * 90), "prompt", "expected at most 34"),
    (dict(prompt=[-1]), "prompt", "got -1, expected ids below 257"),
    (dict(prompt="a" * 600), "prompt", "got '601 tokens', expected 1 to 496"),
    (dict(prompt="a" * 8, max_tokens=510), "prompt", "1 to 2, since 510"),
    (
      dict(max_tokens=0),
      "max_tokens",
      "got 0, expected a number from 1 to 1000000",
    ),
    (dict(max_tokens=-1), "max_tokens", "got -1"),
    (dict(max_tokens=10**9), "max_tokens", "got 1000000000"),
    (dict(max_tokens=512), "max_tokens", "got 512, expected at most 511"),
    (dict(max_tokens="9"), "max_tokens", 'got "9"'),
    (dict(temperature=-0.1), "temperature", "got -0.1"),
    (dict(temperature="hot"), "temperature", 'got "hot"'),
    (dict(temperature=True), "temperature", "got true"),
    (dict(top_p=1.5), "top_p", "got 1.5, expected a number from 0 to 1"),
    (dict(top_k=-1), "top_k", "got -1"),
    (dict(min_p=2), "min_p", "got 2"),
    (dict(repetition_penalty=0), "repetition_penalty", "got 0"),
    (dict(seed=-1), "seed", "got -1"),
    (dict(n=0), "n", "got 0"),
    (dict(n=1000), "n", "got 1000, expected a number from 1 to 128"),
    (dict(logprobs=4), "logprobs", "got 4, expected 0 to 3"),
    (dict(logprobs=True), "logprobs", "got true"),
    (dict(echo=1), "echo", "got 1"),
    (dict(stream="yes"), "stream", 'got "yes"'),
    (dict(stream_options={}), "stream_options", "null without stream=true"),
    (dict(stream=True, stream_options=dict(a=1)), "stream_options", "got 1"),
    (dict(stop=["a"] * 17), "stop", "a list of at most 16 items"),
    (dict(stop="a" * 1001), "stop", "text of at most 1000 characters"),
    (dict(stop=""), "stop", "text of at least 1 character"),
    (dict(stop=[1]), "stop", "got [1]"),
    (dict(presence_penalty=0.5), "presence_penalty", "expected 0"),
    (dict(suffix="a"), "suffix", "not known"),
    (dict(temprature=1), "temprature", "did you mean 'temperature'?"),
    (dict(messages=[]), "messages", "not known"),
  ],
  ids=str,
)
def test_bad_fields(server, fields, param, words):
  body = dict(prompt="a", model="tiny") if fields.keys() != {"prompt"} else {}
  if not fields:
    body = {}
  _refuses(server, body | fields, 400, param, words)


def _refuses(server, body, status, param, words):
  found, answer, _ = server.call("/v1/completions", body)
  error = answer["error"]
  assert (found, error["param"]) == (status, param), error
  assert words in error["message"] and len(error["message"]) < 500
  assert error["type"] == "invalid_request_error"


def test_what_is_accepted_and_means_nothing(server):
  fields = dict(user="me", suffix=None, presence_penalty=0.0, n=None)
  text = server.texts("a", temperature=0, max_tokens=3)
  assert server.texts("a", temperature=0, max_tokens=3, **fields) == text
  # The start of a document is a prompt.
  assert server.complete("")["usage"]["prompt_tokens"] == 1


def test_other_models_urls_methods_and_hosts(server):
  status, answer, _ = server.call("/v1/completions", dict(model="gpt-4"))
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
