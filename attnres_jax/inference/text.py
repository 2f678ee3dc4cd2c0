# SPDX-License-Identifier: Apache-2.0
"""Text in, text out: every drawn token becomes text at once."""

import collections
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from attnres_jax import config as config_lib
from attnres_jax.data import text_format as text_format_lib
from attnres_jax.inference import draw
from attnres_jax.inference import engine as engine_lib


def request(
  text_format: text_format_lib.TextFormat,
  start: str,
  num_tokens: int,
  settings: draw.Settings = draw.Settings(),
  *,
  past_end: bool = False,
  stream: int = 0,
) -> engine_lib.Request:
  """The request to an engine that continues the start of a document.

  With `past_end`, it continues after the end of the document, too.

  Raises:
    ConfigError: the text is no UTF-8.
  """
  try:
    start.encode()
  except UnicodeEncodeError:
    config_lib.fail_argument("prompt", start, "UTF-8 text")
  return engine_lib.Request(
    text_format.prompt(start),
    num_tokens,
    settings,
    frozenset() if past_end else frozenset(text_format.end_ids),
    stream,
  )


class Piece(NamedTuple):
  """More of the text of a prompt, maybe empty; `finish` tells why it ends."""

  index: int
  text: str
  finish: engine_lib.Finish | None


def complete(
  engine: engine_lib.Engine,
  text_format: text_format_lib.TextFormat,
  requests: Sequence[engine_lib.Request],
) -> Iterator[Piece]:
  """Yields a piece for every drawn token.

  Requests get slots in their order. Nothing else uses the engine meanwhile.
  """
  waiting = collections.deque(enumerate(requests))
  running: dict[int, tuple[int, text_format_lib.Decoder]] = {}
  try:
    while waiting or running:
      while waiting and engine.num_free:
        i, request = waiting.popleft()
        decoder = text_format.decoder(request.prompt)
        running[engine.submit(request)] = i, decoder
      for token in engine.step():
        i, decoder = running[token.request]
        more = "" if token.finish == "stop" else decoder.add(token.id)
        if token.finish:
          more += decoder.end()
          del running[token.request]
        yield Piece(i, more, token.finish)
  finally:  # The caller may leave early, and a request may be refused.
    for number in running:
      engine.cancel(number)
