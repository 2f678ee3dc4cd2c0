# SPDX-License-Identifier: Apache-2.0
"""Text in, text out: tokens become text as they are drawn.

A character may consist of several tokens, and a stop string may begin in one
token and end in another. So text is held back while more tokens could change
it.
"""

from collections.abc import Iterator, Sequence
import dataclasses
from typing import NamedTuple

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.config import fields
from attnres_jax.inference import draw
from attnres_jax.inference import engine as engine_lib

# How a decoder shows bytes that are no character, or not yet.
_UNKNOWN = "\ufffd"
# A character has at most so many bytes, and so many tokens.
_MOST_TOKENS = 4


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A text to continue.

  Attributes:
    text: the start of a document.
    num_tokens: how many tokens to draw at most.
    settings: how to draw them.
    stop: the text ends before any of these.
    past_end: continue after the end of a document.
  """

  text: str
  num_tokens: int
  settings: draw.Settings = draw.Settings()
  stop: tuple[str, ...] = ()
  past_end: bool = False

  def __post_init__(self):
    fields.accept("--num_tokens", self.num_tokens, fields.Tokens)
    for text in (self.text, *self.stop):
      try:
        text.encode()
      except UnicodeEncodeError:
        config_lib.fail_argument("prompt", text, "UTF-8 text")
    if "" in self.stop:
      config_lib.fail_argument("stop", "", "strings that are not empty")

  def request(self, tokenizer: data.Tokenizer) -> engine_lib.Request:
    """The same in tokens."""
    separator = tokenizer.separator_id
    return engine_lib.Request(
      [separator, *tokenizer.encode(self.text).tolist()],
      self.num_tokens,
      self.settings,
      frozenset() if self.past_end else frozenset([separator]),
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
  tokenizer: data.Tokenizer,
  prompts: Sequence[Prompt],
) -> Iterator[Piece]:
  """Continues all prompts; yields a piece for every token, as it is drawn."""
  texts, numbers = [], {}
  for i, prompt in enumerate(prompts):
    texts.append(Text(tokenizer, prompt.stop))
    numbers[engine.submit(prompt.request(tokenizer))] = i
  while engine.busy:
    for token in engine.step():
      if (i := numbers.get(token.request)) is None:
        continue
      more, finish = texts[i].take(token)
      if finish:
        engine.cancel(token.request)
        del numbers[token.request]
      yield Piece(i, more, token, finish)


class Text:
  """Decodes the tokens of one text.

  Attributes:
    stopped: whether one of the stop strings was found.
    size: the characters of all complete tokens.
  """

  def __init__(self, tokenizer: data.Tokenizer, stop: Sequence[str] = ()):
    self.stopped, self.size = False, 0
    self._tokenizer = tokenizer
    self._stop = tuple(stop)
    # Decoding may depend on the token before, so the last that is known to be
    # decoded stays here: `_known` tokens of `_ids`.
    self._ids: list[int] = []
    self._known = 0
    self._held = ""

  def take(
    self, token: engine_lib.Token
  ) -> tuple[str, engine_lib.Finish | None]:
    """What a token adds to the text, and why the text ends here, or None."""
    more = "" if token.finish == "stop" else self.add(token.id)
    if token.finish and not self.stopped:
      more += self.end()
    return more, "stop" if self.stopped else token.finish

  def add(self, token: int) -> str:
    """What is certain of the text after another token, and was not before."""
    self._ids.append(token)
    before = self._tokenizer.decode(self._ids[: self._known])
    size = len(self._ids)
    now = self._tokenizer.decode(self._ids)
    if now.endswith(_UNKNOWN):
      if size - self._known < _MOST_TOKENS:
        return ""
      # The first of these begins no character; the others still may.
      size = self._known + 1
      now = self._tokenizer.decode(self._ids[:size])
    # What is no character may still end in the start of one.
    start = max(min(self._known, size + 1 - _MOST_TOKENS), 0)
    self._ids, self._known = self._ids[start:], size - start
    return self._release(now[len(before) :])

  def end(self) -> str:
    """The rest of the text."""
    before = self._tokenizer.decode(self._ids[: self._known])
    rest = self._tokenizer.decode(self._ids)[len(before) :]
    return self._release(rest) + ("" if self.stopped else self._held)

  def _release(self, more: str) -> str:
    """Holds back what may be the start of a stop string."""
    self.size += len(more)
    text = self._held + more
    found = [at for at in map(text.find, self._stop) if at >= 0]
    if found:
      self.stopped, self._held = True, ""
      return text[: min(found)]
    sizes = range(1, max(map(len, self._stop), default=1))
    held = max(
      (n for n in sizes if any(s.startswith(text[-n:]) for s in self._stop)
       and n <= len(text)),
      default=0,
    )  # fmt: skip
    self._held = text[len(text) - held :]
    return text[: len(text) - held]
