# SPDX-License-Identifier: Apache-2.0
"""Text in, text out: every drawn token becomes text at once.

A stop string may begin in one token and end in another. So text that may be the
beginning of one is held back.
"""

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
  parse_special: bool = False,
  stream: int = 0,
) -> engine_lib.Request:
  """The request to an engine that continues a text.

  Args:
    text_format: of the network.
    start: of a document.
    num_tokens: how many tokens to draw at most.
    settings: how to draw them.
    past_end: continue after the end of a document.
    parse_special: whether special tokens written in the text are tokens.
    stream: see `engine.Request`.

  Raises:
    ConfigError: the text is no UTF-8.
  """
  try:
    start.encode()
  except UnicodeEncodeError:
    config_lib.fail_argument("prompt", start, "UTF-8 text")
  return engine_lib.Request(
    text_format.prompt(start, parse_special),
    num_tokens,
    settings,
    frozenset() if past_end else frozenset(text_format.end_ids),
    stream,
  )


class Piece(NamedTuple):
  """More of a text.

  Attributes:
    index: of its prompt.
    text: which may be empty.
    token: that was drawn.
    finish: why this is the last piece, or None.
  """

  index: int
  text: str
  token: engine_lib.Token
  finish: engine_lib.Finish | None


def complete(
  engine: engine_lib.Engine,
  text_format: text_format_lib.TextFormat,
  requests: Sequence[tuple[engine_lib.Request, Sequence[str]]],
) -> Iterator[Piece]:
  """Yields a piece for every drawn token.

  Args:
    engine: which nothing else uses meanwhile.
    text_format: of its network.
    requests: each with the texts that end it.
  """
  waiting = collections.deque(enumerate(requests))
  running: dict[int, tuple[int, Text]] = {}
  try:
    while waiting or running:
      while waiting and engine.num_free:
        i, (request, stop) = waiting.popleft()
        text = Text(text_format, request.prompt, stop)
        running[engine.submit(request)] = i, text
      for token in engine.step():
        if token.request not in running:
          continue  # A stop string has ended it, by a token of the same step.
        i, text = running[token.request]
        piece = text.take(token, i)
        if piece.finish:
          engine.cancel(token.request)
          del running[token.request]
        yield piece
  finally:  # The caller may leave early, and a request may be refused.
    for number in running:
      engine.cancel(number)


class Text:
  """The text of drawn tokens, up to a stop string.

  Attributes:
    stopped: whether one of the stop strings was found.
  """

  def __init__(
    self,
    text_format: text_format_lib.TextFormat,
    before: Sequence[int] = (),
    stop: Sequence[str] = (),
  ):
    """For what follows the ids `before`, up to any of the strings `stop`."""
    self.stopped = False
    self._decoder = text_format.decoder(before)
    self._stop = tuple(stop)
    self._held = ""

  def take(self, token: engine_lib.Token, index: int) -> Piece:
    """The piece that a token adds to the text of this index."""
    more = "" if token.finish == "stop" else self.add(token.id)
    if token.finish and not self.stopped:
      more += self.end()
    finish = "stop" if self.stopped else token.finish
    return Piece(index, more, token, finish)

  def add(self, token: int) -> str:
    """What is certain of the text after another token, and was not before."""
    return self._release(self._decoder.add(token))

  def end(self) -> str:
    """The rest of the text."""
    rest = self._release(self._decoder.end())
    return rest + ("" if self.stopped else self._held)

  def _release(self, more: str) -> str:
    """Holds back what may be the start of a stop string."""
    text = self._held + more
    starts = [at for at in map(text.find, self._stop) if at >= 0]
    if starts:
      self.stopped, self._held = True, ""
      return text[: min(starts)]
    held = max((_overlap(text, stop) for stop in self._stop), default=0)
    self._held = text[len(text) - held :]
    return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
  """How many of the last characters of a text may begin `stop`."""
  at = max(len(text) - len(stop) + 1, 0)
  while (at := text.find(stop[0], at)) >= 0:
    if stop.startswith(text[at:]):
      return len(text) - at
    at += 1
  return 0
