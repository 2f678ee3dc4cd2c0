# SPDX-License-Identifier: Apache-2.0
"""Limits of connections: uvicorn has none before a request is complete.

A client that opens connections and sends nothing, or half of its headers, would
hold them for ever.
"""

import json
from typing import Any

from uvicorn.protocols.http import h11_impl

from attnres_jax.inference.serving import api

_AT_ONCE = 8192  # Bytes of a connection.
_ERROR = api.busy("too many connections", 503, "connections_full")
_BODY = json.dumps(_ERROR.as_json()).encode()
_FULL = (
  b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n"
  b"content-type: application/json\r\nconnection: close\r\n"
  b"content-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


def protocol(max_connections: int, idle_seconds: float) -> type:
  """The class for connections of `uvicorn.Config(http=...)`.

  Args:
    max_connections: connections at the same time; more get HTTP 503.
    idle_seconds: a connection without a complete request header is closed after
      this time, from its start or its last answer. Bytes do not prolong it.
  """

  class Protocol(h11_impl.H11Protocol):
    """One connection."""

    def connection_made(self, transport: Any) -> None:
      super().connection_made(transport)
      # uvicorn's own, of five seconds, is after an answer.
      self.timeout_keep_alive = idle_seconds  # pyrefly: ignore
      self._received, self._turn = bytearray(), None
      self._deadline = self.loop.time() + idle_seconds
      self._watcher = self.loop.call_later(idle_seconds, self._watch)
      if len(self.connections) > max_connections:
        transport.write(_FULL)
        transport.close()

    def data_received(self, data: bytes) -> None:
      # A body may come in a million chunks. Between two parts of it, others
      # have their turns; until all are read, no more is received.
      self._received += data
      if self._turn is None:
        self._take()

    def _take(self) -> None:
      part = bytes(self._received[:_AT_ONCE])
      del self._received[:_AT_ONCE]
      self._turn = None
      super().data_received(part)
      if self.transport.is_closing():
        return
      if self._received:
        self.transport.pause_reading()
        self._turn = self.loop.call_soon(self._take)
      elif not self.flow.read_paused:
        self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
      self._watcher.cancel()
      if self._turn is not None:
        self._turn.cancel()
      super().connection_lost(exc)

    def on_response_complete(self) -> None:
      self._deadline = self.loop.time() + idle_seconds
      super().on_response_complete()

    def _watch(self) -> None:
      active = self.cycle is not None and not self.cycle.response_complete
      if self.transport.is_closing():
        # The client does not read its last answer.
        self.transport.abort()
        return
      left = self._deadline - self.loop.time()
      if not active and left <= 0:
        self.transport.close()
      left = idle_seconds if active or left <= 0 else left
      self._watcher = self.loop.call_later(left, self._watch)

  return Protocol
