# SPDX-License-Identifier: Apache-2.0
"""Answers in the form of the API, from the pieces of texts.

A whole answer is the sum of the parts that a stream would send, so both are
made by `Answer.part`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import math
import time
from typing import Any, NamedTuple
import uuid

from attnres_jax.data import text_format as text_format_lib
from attnres_jax.inference import scores as scores_lib
from attnres_jax.inference import text as text_lib
from attnres_jax.inference.serving import api
from attnres_jax.inference.serving import service

# In the API, the least log-probability.
_LEAST = -9999.0


class Prompt(NamedTuple):
  """A text to continue.

  Attributes:
    ids: ids of its tokens.
    opening: number of ids at the start that `echo` leaves out.
    text: what `echo` repeats.
  """

  ids: list[int]
  opening: int
  text: str


class _Entry(NamedTuple):
  """A token of an answer; `score` is None if nothing stands before it."""

  id: int
  score: scores_lib.Score | None
  offset: int


class Answer:
  """The answer to one request for completions or a chat.

  Attributes:
    usage: numbers of tokens so far, as the API counts them.
  """

  def __init__(
    self,
    asked: api.Completion | api.Chat,
    prompts: Sequence[Prompt],
    text_format: text_format_lib.TextFormat,
    label: Callable[[int], str],
    model: str,
  ):
    """For the answer of `model`; `label` gives the text of one token."""
    self._asked, self._prompts = asked, prompts
    self._format, self._label = text_format, label
    self._chat = isinstance(asked, api.Chat)
    self._echo = getattr(asked, "echo", False)
    self._num_top = getattr(asked, "logprobs", None)
    kind = "chat.completion" if self._chat else "text_completion"
    if self._chat and asked.stream:
      kind += ".chunk"
    self._head = dict(
      id=f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
      object=kind,
      created=int(time.time()),
      model=model,
    )
    self._prompt_tokens = self._drawn_tokens = 0

  @property
  def usage(self) -> dict[str, Any]:
    return dict(
      prompt_tokens=self._prompt_tokens,
      completion_tokens=self._drawn_tokens,
      total_tokens=self._prompt_tokens + self._drawn_tokens,
    )

  def part(self, piece: service.Piece) -> dict[str, Any]:
    """What one piece adds to its choice."""
    prompt = self._prompts[piece.index // self._asked.n]
    choice: dict[str, Any] = dict(
      index=piece.index, text="", logprobs=None, finish_reason=piece.finish
    )
    entries: list[_Entry] = []
    ids: list[int] = []
    if piece.token.scores is not None:
      if piece.index % self._asked.n == 0:
        self._prompt_tokens += len(prompt.ids)
      if self._echo:
        choice["text"] += prompt.text
        entries += self._of_prompt(prompt, piece.token.scores)
      if self._asked.return_token_ids:
        choice["prompt_token_ids"] = prompt.ids
    if self._asked.max_tokens:
      self._drawn_tokens += 1
      start = len(prompt.text) if self._echo else 0
      score = scores_lib.Score(piece.token.logprob, piece.token.top)
      entries.append(_Entry(piece.token.id, score, start + piece.offset))
      choice["text"] += piece.text
      ids.append(piece.token.id)
    elif piece.finish:
      choice["finish_reason"] = "length"
    if self._num_top is not None:
      choice["logprobs"] = self._logprobs(entries, self._num_top)
    if self._asked.return_token_ids:
      choice["token_ids"] = ids
    return choice

  def is_silent(self, part: dict[str, Any]) -> bool:
    """Whether a stream may leave it out."""
    ids = self._asked.return_token_ids
    wanted = ids or part["logprobs"] is not None
    return not (wanted or part["text"] or part["finish_reason"])

  def chunk(self, part: dict[str, Any] | None) -> dict[str, Any]:
    """An event of a stream; without a part, the last one, with the usage."""
    choices = [] if part is None else [self._formed(part, "delta")]
    event: dict[str, Any] = self._head | dict(choices=choices)
    if self._asked.with_usage:
      event["usage"] = self.usage if part is None else None
    return event

  def whole(self, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The answer without a stream."""
    choices: dict[int, list[dict[str, Any]]] = {}
    for part in parts:
      choices.setdefault(part["index"], []).append(part)
    in_order = [
      self._formed(_sum(choices[index]), "message") for index in sorted(choices)
    ]
    return self._head | dict(choices=in_order, usage=self.usage)

  def _formed(self, choice: dict[str, Any], name: str) -> dict[str, Any]:
    """A choice, or a part of one, as the API of the request has it."""
    if not self._chat:
      return choice
    text = choice.pop("text")
    return choice | {name: dict(role="assistant", content=text)}

  def _of_prompt(
    self, prompt: Prompt, scores: tuple[scores_lib.Score, ...]
  ) -> Iterator[_Entry]:
    """The tokens of a prompt, without what opens a text."""
    decoder = text_lib.Text(self._format)
    scored = zip(prompt.ids, (None, *scores))
    for at, (id, score) in enumerate(scored):
      if at >= prompt.opening:
        yield _Entry(id, score, decoder.size)
        decoder.add(id)

  def _logprobs(
    self, entries: list[_Entry], num_top: int
  ) -> dict[str, list[Any]]:
    return dict(
      tokens=[self._label(entry.id) for entry in entries],
      token_logprobs=[
        entry.score and _finite(entry.score.logprob) for entry in entries
      ],
      top_logprobs=[
        entry.score and self._top(entry.id, entry.score, num_top)
        for entry in entries
      ],
      text_offset=[entry.offset for entry in entries],
    )

  def _top(
    self, id: int, score: scores_lib.Score, num_top: int
  ) -> dict[str, float]:
    """The likely tokens and, as in the API, the one that is there."""
    found: dict[str, float] = {}
    ids = dict([*score.top[:num_top], (id, score.logprob)])
    for one, logprob in ids.items():
      name = self._label(one)
      name = text_format_lib.label_of_id(one) if name in found else name
      found[name] = _finite(logprob)
    return found


def _finite(logprob: float) -> float:
  return max(logprob, _LEAST) if math.isfinite(logprob) else _LEAST


def _sum(parts: list[dict[str, Any]]) -> dict[str, Any]:
  """A choice from its parts."""
  choice = dict(parts[0], finish_reason=parts[-1]["finish_reason"])
  choice["text"] = "".join(part["text"] for part in parts)
  if choice["logprobs"] is not None:
    choice["logprobs"] = {
      name: [value for part in parts for value in part["logprobs"][name]]
      for name in choice["logprobs"]
    }
  if "token_ids" in choice:
    choice["token_ids"] = [id for part in parts for id in part["token_ids"]]
  return choice
