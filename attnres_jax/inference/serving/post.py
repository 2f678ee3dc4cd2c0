# SPDX-License-Identifier: Apache-2.0
"""POST: reads a body, and sends the answer whole or in parts.

A client that leaves ends the work for its answer, in every state of it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
import contextlib
import json
import logging
from typing import Any

from starlette import requests
from starlette import responses
from starlette import types

from attnres_jax import config as config_lib
from attnres_jax.inference.serving import api

# For a whole body, and for an error to a client that reads nothing.
_BODY_SECONDS, _ERROR_SECONDS = 30, 10
_STREAM = {
  "content-type": "text/event-stream; charset=utf-8",
  "cache-control": "no-store",
  # A proxy such as nginx would wait for more.
  "x-accel-buffering": "no",
}


class Reply:
  """Sends one answer: all of it, or a stream of events."""

  def __init__(self, scope: types.Scope, send: types.Send):
    self._scope, self._send, self._is_stream = scope, send, False

  async def json(
    self,
    values: dict[str, Any],
    status: int = 200,
    headers: Mapping[str, str] | None = None,
  ) -> None:
    """Sends all of an answer, whose `choices` may be large.

    Each of them is written by itself, so that other clients do not wait.
    """
    head = values | dict(choices=[]) if "choices" in values else values
    # In ASCII: messages may quote what is no UTF-8.
    body = json.dumps(head, allow_nan=False).encode()
    if "choices" in values:
      choices = []
      for choice in values["choices"]:
        choices.append(json.dumps(choice, allow_nan=False).encode())
        await asyncio.sleep(0)
      start, end = body.split(b'"choices": []')
      body = b"".join([start, b'"choices": [', b", ".join(choices), b"]", end])
    response = responses.Response(body, status, headers, "application/json")
    await response(self._scope, requests.empty_receive, self._send)

  async def event(self, values: dict[str, Any]) -> None:
    """Sends a part of a stream."""
    if not self._is_stream:
      self._is_stream = True
      start = responses.Response(headers=_STREAM)
      del start.headers["content-length"]
      await self._send(
        dict(type="http.response.start", status=200, headers=start.raw_headers)
      )
    await self._data(json.dumps(values, allow_nan=False), more=True)

  async def end(self) -> None:
    """Ends a stream as the API does."""
    await self._data("[DONE]", more=False)

  async def error(self, error: api.ApiError) -> None:
    """Sends an error, in a stream that has begun as its last event."""
    if self._is_stream:
      await self._data(json.dumps(error.as_json()), more=False)
      return
    wait = error.retry_after
    headers = None if wait is None else {"retry-after": str(wait)}
    await self.json(error.as_json(), error.status, headers)

  async def _data(self, line: str, more: bool) -> None:
    body = f"data: {line}\n\n".encode()
    await self._send(dict(type="http.response.body", body=body, more_body=more))


class Post:
  """An ASGI application that answers bodies at one path."""

  def __init__(
    self,
    path: str,
    answer: Callable[[bytes, Reply], Awaitable[None]],
    *,
    body_bytes: int,
    seconds: float,
  ):
    """Prepares a path.

    Args:
      path: for the log.
      answer: sends the answer to a body; may raise `ApiError`, and is
        cancelled if the client leaves.
      body_bytes: largest body.
      seconds: longest time for an answer.
    """
    self._path, self._answer = path, answer
    self._body_bytes, self._seconds = body_bytes, seconds

  async def __call__(
    self, scope: types.Scope, receive: types.Receive, send: types.Send
  ) -> None:
    reply = Reply(scope, send)
    try:
      body = await self._body(requests.Request(scope, receive))
      work = asyncio.create_task(self._work(body, reply))
      await _until_left(work, receive)
    except api.ApiError as error:
      await reply.error(error)
    except requests.ClientDisconnect:
      pass

  async def _body(self, request: requests.Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0]
    if kind.strip().lower() != "application/json":
      # Other kinds could be sent by a page of any web site.
      raise api.ApiError(
        415, f"Content-Type: got {kind!r}, expected 'application/json'"
      )
    body, most = bytearray(), self._body_bytes
    try:
      async with asyncio.timeout(_BODY_SECONDS):
        async for part in request.stream():
          body += part
          if len(body) > most:
            words = f"body: got more than {most} bytes, expected at most {most}"
            raise api.ApiError(413, words, code="body_too_large")
    except TimeoutError:
      words = f"body: not complete after {_BODY_SECONDS} s"
      raise api.ApiError(408, words) from None
    return bytes(body)

  async def _work(self, body: bytes, reply: Reply) -> None:
    try:
      async with asyncio.timeout(self._seconds):
        await self._answer(body, reply)
      return
    except TimeoutError:
      error = api.failed(
        504, f"the answer was not complete after {self._seconds:g} s", "timeout"
      )
    except api.ApiError as refused:
      error = refused
    except config_lib.ConfigError as refused:
      error = api.of_config_error(refused)
    except Exception:
      logging.exception("a request to %s has failed", self._path)
      words = "the server has failed; its log says why"
      error = api.failed(500, words, "internal_error")
    # A client that reads nothing would otherwise stay here.
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(_ERROR_SECONDS):
        await reply.error(error)


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
