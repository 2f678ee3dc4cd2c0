# SPDX-License-Identifier: Apache-2.0
"""An endpoint that takes JSON: limits, errors, and clients that leave."""

import asyncio
from collections.abc import Awaitable, Callable
import contextlib
import json
from typing import Any

from absl import logging
from starlette import datastructures
from starlette import responses
from starlette import types

from attnres_jax import config as config_lib
from attnres_jax.inference.serving import api
from attnres_jax.inference.serving import metrics as metrics_lib

# As in the logs of nginx: the client has closed its connection.
_LEFT = 499
_BODY_SECONDS, _ERROR_SECONDS = 30, 5


class Reply:
  """The answer to one request: a JSON object, or a stream of them.

  Attributes:
    status: of HTTP, once something was sent.
  """

  def __init__(self, send: types.Send):
    self.status: int | None = None
    self._send = send
    self._is_stream = False

  async def json(
    self,
    values: dict[str, Any],
    status: int = 200,
    headers: dict[str, str] | None = None,
  ) -> None:
    """Sends all of the answer."""
    self.status = status
    # In ASCII: messages may quote what is no UTF-8.
    body = json.dumps(values, allow_nan=False).encode()
    await self._whole([body], status, headers)

  async def choices(self, values: dict[str, Any]) -> None:
    """Sends all of an answer with `choices`, which may be large.

    Each is written by itself, so that other clients do not wait for all.
    """
    self.status = 200
    head, choices = values | dict(choices=[]), []
    for choice in values["choices"]:
      choices.append(json.dumps(choice, allow_nan=False).encode())
      await asyncio.sleep(0)
    start, end = json.dumps(head).encode().split(b'"choices": []')
    parts = [start, b'"choices": [', b", ".join(choices), b"]", end]
    await self._whole(parts, 200, None)

  async def _whole(
    self, parts: list[bytes], status: int, headers: dict[str, str] | None
  ) -> None:
    body = b"".join(parts)
    response = responses.Response(
      body, status, headers, media_type="application/json"
    )
    await self._send(
      dict(
        type="http.response.start",
        status=status,
        headers=response.raw_headers,
      )
    )
    await self._send(dict(type="http.response.body", body=body))

  async def event(self, values: dict[str, Any]) -> None:
    """Sends a part of a stream."""
    if not self._is_stream:
      self._is_stream, self.status = True, 200
      headers = datastructures.MutableHeaders(
        {
          "content-type": "text/event-stream; charset=utf-8",
          "cache-control": "no-store",
          # A proxy such as nginx would wait for more.
          "x-accel-buffering": "no",
        }
      )
      await self._send(
        dict(type="http.response.start", status=200, headers=headers.raw)
      )
    await self._data(json.dumps(values, allow_nan=False), more=True)

  async def end(self) -> None:
    """Ends a stream as the API does."""
    await self._data("[DONE]", more=False)

  async def error(self, error: api.ApiError) -> None:
    """Sends an error, in a stream that has begun as its last event."""
    if self._is_stream:
      await self._data(json.dumps(error.as_json()), more=False)
      self.status = error.status
      return
    wait = error.retry_after
    headers = None if wait is None else {"retry-after": str(wait)}
    await self.json(error.as_json(), error.status, headers)

  async def _data(self, line: str, more: bool) -> None:
    body = f"data: {line}\n\n".encode()
    await self._send(dict(type="http.response.body", body=body, more_body=more))


class Post:
  """Reads a body, and has it answered unless the client leaves."""

  def __init__(
    self,
    path: str,
    answer: Callable[[bytes, Reply], Awaitable[None]],
    metrics: metrics_lib.Metrics,
    *,
    body_bytes: int,
    seconds: float,
  ):
    """An ASGI application.

    Args:
      path: where it is, for metrics.
      answer: sends the answer to a body; may raise `ApiError`, and is
        cancelled if the client leaves.
      metrics: which it counts.
      body_bytes: the most that a body may have.
      seconds: the most that an answer may take.
    """
    self._path, self._answer, self._metrics = path, answer, metrics
    self._body_bytes, self._seconds = body_bytes, seconds

  async def __call__(
    self, scope: types.Scope, receive: types.Receive, send: types.Send
  ) -> None:
    reply = Reply(send)
    try:
      headers = datastructures.Headers(scope=scope)
      body = await self._body(headers, receive)
      work = asyncio.create_task(self._work(body, reply))
      await _until_left(work, receive)
      if work.cancelled():
        reply.status = _LEFT
    except api.ApiError as error:
      await reply.error(error)
    except _LeftError:
      pass
    finally:
      status = reply.status or _LEFT
      self._metrics.requests.labels(self._path, status).inc()

  async def _body(
    self, headers: datastructures.Headers, receive: types.Receive
  ) -> bytes:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
      # Other kinds could be sent by a page of any web site.
      raise api.ApiError(
        415, f"Content-Type: got {kind!r}, expected 'application/json'"
      )
    parts, size = [], 0
    try:
      async with asyncio.timeout(_BODY_SECONDS):
        while True:
          message = await receive()
          if message["type"] == "http.disconnect":
            raise _LeftError
          parts.append(message.get("body", b""))
          size += len(parts[-1])
          if size > self._body_bytes:
            raise api.ApiError(
              413,
              f"body: got more than {self._body_bytes} bytes, the most that"
              " this server reads",
              code="body_too_large",
            )
          if not message.get("more_body"):
            return b"".join(parts)
    except TimeoutError:
      raise api.ApiError(
        408, f"body: not complete after {_BODY_SECONDS} s"
      ) from None

  async def _work(self, body: bytes, reply: Reply) -> None:
    try:
      async with asyncio.timeout(self._seconds):
        await self._answer(body, reply)
      return
    except TimeoutError:
      error = api.ApiError(
        504,
        f"the answer was not complete after {self._seconds:g} s, the most that"
        " this server takes",
        kind="server_error",
        code="timeout",
      )
    except api.ApiError as refused:
      error = refused
    except config_lib.ConfigError as refused:
      error = api.of_config_error(refused)
    except Exception:
      logging.exception("a request to %s has failed", self._path)
      error = api.ApiError(
        500,
        "the server has failed; its log says why",
        kind="server_error",
        code="internal_error",
      )
    # A client that reads nothing would otherwise stay here.
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(_ERROR_SECONDS):
        await reply.error(error)


class _LeftError(Exception):
  """The client has left before its body was complete."""


async def _until_left(work: asyncio.Task[None], receive: types.Receive) -> None:
  """Waits for the end of `work`; cancels it if the client leaves before."""

  async def leaves():
    while (await receive())["type"] != "http.disconnect":
      pass

  left = asyncio.create_task(leaves())
  try:
    await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
  finally:
    work.cancel()
    left.cancel()
    await asyncio.gather(work, left, return_exceptions=True)
