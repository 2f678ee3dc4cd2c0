# SPDX-License-Identifier: Apache-2.0
"""A server in a network: keys, half-sent requests, neighbours."""

import contextlib
import http.client
import json
import random
import socket
import string
import threading
import time

import pytest

from tests.inference.serving import local_server

LENGTH = local_server.LENGTH
IDLE, CONNECTIONS = 0.5, 6


def test_every_path_but_the_page_and_health_needs_the_key(model):
  with contextlib.closing(local_server.Server(model, api_key="s3cret")) as one:
    for path in ("/v1/models", "/v1/other", "/v1/completions"):
      for headers in (
        {},
        {"Authorization": "Bearer s3cre"},
        {"Authorization": "Basic s3cret"},
      ):
        status, answer, found = one.call(path, headers=headers)
        assert status == 401 and found["www-authenticate"] == "Bearer"
        assert answer["error"]["code"] == "invalid_api_key"
    assert one.call("/health")[0] == 200
    right = {"Authorization": "bearer s3cret"}
    assert one.call("/v1/models", headers=right)[0] == 200
    body = json.dumps(dict(prompt="a", max_tokens=2)).encode()
    right["Content-Type"] = "application/json"
    assert one.call("/v1/completions", body, right)[0] == 200


@pytest.fixture(scope="module")
def strict(model):
  """A server with few connections, which may be idle for half a second."""
  server = local_server.Server(
    model, connections=CONNECTIONS, idle_seconds=IDLE
  )
  yield server
  server.close()


def _seconds_until_closed(connection):
  begin = time.monotonic()
  connection.settimeout(20)
  with contextlib.suppress(ConnectionError):
    while connection.recv(1000):
      pass
  return time.monotonic() - begin


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: 127"])
def test_connections_without_a_request_are_closed(strict, sent):
  address = "127.0.0.1", strict.port
  with socket.create_connection(address) as connection:
    connection.sendall(sent)
    assert IDLE / 2 < _seconds_until_closed(connection) < 5 * IDLE


def test_bytes_do_not_prolong_a_header(strict):
  """One byte at a time, the header of a second request included."""
  whole = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
  for before in (b"", whole):
    with socket.create_connection(("127.0.0.1", strict.port)) as connection:
      connection.sendall(before + b"GET /health HTTP/1.1\r\nX: ")
      begin = time.monotonic()
      with contextlib.suppress(ConnectionError):
        while time.monotonic() < begin + 20:
          connection.sendall(b"x")
          time.sleep(0.05)
      assert time.monotonic() - begin < 5 * IDLE


def test_a_connection_waits_for_its_next_request(strict):
  address = "127.0.0.1", strict.port
  with contextlib.closing(http.client.HTTPConnection(*address)) as connection:
    for _ in range(2):
      connection.request("GET", "/health")
      assert connection.getresponse().read()
      time.sleep(IDLE / 2)


def test_connections_have_a_limit(strict):
  address = "127.0.0.1", strict.port
  with contextlib.ExitStack() as stack:
    for _ in range(CONNECTIONS):
      stack.enter_context(socket.create_connection(address))
    time.sleep(0.1)
    with socket.create_connection(address) as connection:
      connection.settimeout(5)
      assert connection.recv(100).startswith(b"HTTP/1.1 503")
  local_server.until(lambda: strict.call("/health")[0] == 200)


def test_a_running_answer_is_not_idle(strict):
  """A text that takes longer than the limit of idle connections."""
  engine = strict.app.service._engine
  step = engine.step

  def slow_step():
    time.sleep(0.05)
    return step()

  engine.step = slow_step
  try:
    begin = time.monotonic()
    answer = strict.complete("a", max_tokens=30, past_end=True)
  finally:
    engine.step = step
  assert time.monotonic() - begin > 2 * IDLE
  assert answer["usage"]["completion_tokens"] == 30


_KINDS, _COMPLETIONS = 15, "/v1/completions"


def _bodies(rng, count):
  """Bodies within the limits, as large as these allow.

  Yields:
    The path, the body, and the size of the chunks that it is sent in, or 0.
  """
  limit = 2**20
  text = "".join(rng.choice(string.printable) for _ in range(1000))
  for number in range(count):
    kind = number % _KINDS
    body = dict(prompt="a", max_tokens=rng.randrange(1, 5))
    if kind == 0:
      body |= rng.choice(
        (dict(prompt=["a"] * 20_000, n=128), dict(n=34, max_tokens=300))
      )
    elif kind == 1:
      body |= dict(stop="a" * (limit - 1000))
    elif kind == 2:
      body |= dict(stop=[("a" * 999) + chr(65 + i) for i in range(16)])
      body |= dict(prompt="a" * 200, max_tokens=40, past_end=True)
    elif kind == 3:
      body |= dict(prompt=text * 1000)
    elif kind == 4:
      body |= dict(prompt=[rng.randrange(300) for _ in range(180_000)])
    elif kind == 5:
      body |= dict(prompt=[[97] * 400] * 34, logprobs=3)
    elif kind == 6:
      body |= dict(user="x" * (limit - 1000))
    elif kind == 7:
      body |= {f"field{i}": i for i in range(20_000)}
    elif kind in (8, 9, 10):  # Lists: deep, small, of the wrong entries.
      part = (b"[" * 100 + b"]" * 100, b"[1]", b"[]")[kind - 8]
      parts = b",".join([part] * ((limit - 100) // (len(part) + 1)))
      yield _COMPLETIONS, b'{"prompt":[' + parts + b"]}", 0
      continue
    elif kind == 11:
      parts = b",".join([b"{}"] * (limit // 3 - 100))
      yield _COMPLETIONS, b'{"stop":[' + parts + b"]}", 0
      continue
    elif kind == 12:  # Most of what is sent are the sizes of chunks.
      body |= dict(prompt=text * 200)
      yield _COMPLETIONS, json.dumps(body).encode(), 1
      continue
    elif kind == 13:
      ids = [rng.randrange(256) for _ in range(rng.choice((9, 400, 180_000)))]
      yield "/depth_weights", json.dumps(dict(prompt=ids)).encode(), 0
      continue
    else:
      body |= dict(n=34, logprobs=3, prompt="a" * 300)
    yield _COMPLETIONS, json.dumps(body).encode()[:limit], 0


def _longest_waits(server, bodies):
  """The longest waits of a neighbour while bodies are answered.

  In seconds of this process's processors: other work of the machine does not
  count, and both the server and its clients do.

  Returns:
    For /health, for a text's first event, between two events; and the number of
    events.
  """

  def attack():
    for path, body, size in bodies:
      address = "127.0.0.1", server.port
      with contextlib.closing(
        http.client.HTTPConnection(*address, timeout=600)
      ) as connection:
        headers = {"Content-Type": "application/json"}
        if size:
          headers["Transfer-Encoding"] = "chunked"
          chunk = b"%x\r\n%b\r\n"
          parts = (body[i : i + size] for i in range(0, len(body), size))
          body = b"".join(chunk % (len(part), part) for part in parts)
          body += b"0\r\n\r\n"
        connection.request("POST", path, body, headers)
        connection.getresponse().read()

  attacker = threading.Thread(target=attack)
  attacker.start()
  waits, count = dict(health=0.0, first=0.0, next=0.0), 0

  def note(name, begin):
    now = time.process_time()
    waits[name] = max(waits[name], now - begin)
    return now

  while attacker.is_alive():
    begin = time.process_time()
    assert server.call("/health")[0] == 200
    begin = note("health", begin)
    # Its prompt is new, so that nothing is known of it.
    prompt = "".join(random.choice("abcdef") for _ in range(20))
    fields = dict(temperature=0.5, max_tokens=24, past_end=True)
    connection, events = server.stream(prompt, **fields)
    with contextlib.closing(connection):
      name = "first"
      for event in events:
        assert event == "[DONE]" or "error" not in event
        begin, name, count = note(name, begin), "next", count + 1
  attacker.join()
  return waits, count


@pytest.fixture(scope="module")
def warm(model):
  engine = local_server.make_engine(model)
  assert engine.warm_up() == 6
  server = local_server.Server(model, engine)
  yield server
  local_server.until(server.is_idle, 60)
  server.close()


@pytest.mark.parametrize(
  "rounds", [1, pytest.param(10, marks=pytest.mark.slow)]
)
def test_no_body_delays_a_neighbour_by_a_second(warm, rounds):
  bodies = [*_bodies(random.Random(0), rounds * _KINDS)]
  waits, events = _longest_waits(warm, bodies)
  local_server.until(warm.is_idle, 120)
  print(waits, f"s, {events} events beside {len(bodies)} bodies")
  assert max(waits.values()) < 1


def test_one_request_leaves_a_slot_and_places_to_others(warm):
  """Though its texts came first."""
  body = dict(prompt="a" * 40, max_tokens=400, past_end=True, temperature=0)
  begin = threading.Thread(target=warm.call, args=(
    "/v1/completions", body | dict(n=30),
  ))  # fmt: skip
  begin.start()
  local_server.until(lambda: warm.running == 3)
  assert warm.texts("b", max_tokens=2, past_end=True)
  assert warm.running == 3 and warm.waiting > 20
  begin.join()
