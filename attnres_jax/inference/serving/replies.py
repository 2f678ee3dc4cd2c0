# SPDX-License-Identifier: Apache-2.0
"""Answers in the form of the API, from the pieces of texts.

A whole answer is the sum of the parts that a stream would send, so both are
made by `Completion.part`.
"""

from collections.abc import Iterable, Iterator
import math
import time
from typing import Any, NamedTuple
import uuid

from attnres_jax import data
from attnres_jax.inference import scores as scores_lib
from attnres_jax.inference import text as text_lib
from attnres_jax.inference.serving import asked as asked_lib
from attnres_jax.inference.serving import service

# In the API, the least log-probability.
_LEAST = -9999.0
_SEPARATOR = "<|endoftext|>"


class _Entry(NamedTuple):
  """A token of an answer; `score` is None for the first one of ids."""

  id: int
  score: scores_lib.Score | None
  offset: int


class Completion:
  """The answer to one request.

  Attributes:
    usage: numbers of tokens so far, as the API counts them.
  """

  def __init__(
    self, asked: asked_lib.Asked, tokenizer: data.Tokenizer, model: str
  ):
    self._asked, self._tokenizer = asked, tokenizer
    self._head = dict(
      id=f"cmpl-{uuid.uuid4().hex}",
      object="text_completion",
      created=int(time.time()),
      model=model,
    )
    self._prompt_tokens = self._cached_tokens = self._drawn_tokens = 0

  @property
  def usage(self) -> dict[str, Any]:
    return dict(
      prompt_tokens=self._prompt_tokens,
      completion_tokens=self._drawn_tokens,
      total_tokens=self._prompt_tokens + self._drawn_tokens,
      prompt_tokens_details=dict(cached_tokens=self._cached_tokens),
    )

  def part(self, piece: service.Piece) -> dict[str, Any]:
    """What one piece adds to its choice."""
    asked = self._asked
    prompt = asked.prompts[piece.index // asked.num_choices]
    choice: dict[str, Any] = dict(
      index=piece.index, text="", logprobs=None, finish_reason=piece.finish
    )
    entries: list[_Entry] = []
    ids: list[int] = []
    if piece.token.prompt is not None:
      if piece.index % asked.num_choices == 0:
        self._prompt_tokens += len(prompt.ids)
        self._cached_tokens += piece.token.prompt.reused
      if asked.echo:
        choice["text"] += prompt.text
        entries += self._of_prompt(prompt, piece.token.prompt.scores)
      if asked.with_ids:
        choice["prompt_token_ids"] = prompt.ids
    if asked.num_tokens:
      self._drawn_tokens += 1
      start = len(prompt.text) if asked.echo else 0
      score = scores_lib.Score(piece.token.logprob, piece.token.top)
      entries.append(_Entry(piece.token.id, score, start + piece.offset))
      choice["text"] += piece.text
      ids.append(piece.token.id)
    elif piece.finish:
      choice["finish_reason"] = "length"
    if asked.logprobs is not None:
      choice["logprobs"] = self._logprobs(entries, asked.logprobs)
    if asked.with_ids:
      choice["token_ids"] = ids
    return choice

  def is_silent(self, part: dict[str, Any]) -> bool:
    """Whether a stream may leave it out."""
    wanted = self._asked.with_ids or part["logprobs"] is not None
    return not (wanted or part["text"] or part["finish_reason"])

  def chunk(self, part: dict[str, Any] | None) -> dict[str, Any]:
    """An event of a stream; without a part, the last one, with the usage."""
    event: dict[str, Any] = self._head | dict(
      choices=[] if part is None else [part]
    )
    if self._asked.with_usage:
      event["usage"] = self.usage if part is None else None
    return event

  def whole(self, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The answer without a stream."""
    choices: dict[int, dict[str, Any]] = {}
    for part in parts:
      if part["index"] in choices:
        _add(choices[part["index"]], part)
      else:
        choices[part["index"]] = part
    in_order = [choices[index] for index in sorted(choices)]
    return self._head | dict(choices=in_order, usage=self.usage)

  def _of_prompt(
    self, prompt: asked_lib.Prompt, scores: tuple[scores_lib.Score, ...]
  ) -> Iterator[_Entry]:
    """The tokens of a prompt, without the separator that opens a text."""
    decoder = text_lib.Text(self._tokenizer)
    # Nothing comes before the first id, so it has no score.
    scored = zip(prompt.ids, (None, *scores))
    for at, (id, score) in enumerate(scored):
      if at or not prompt.opened:
        yield _Entry(id, score, decoder.size)
        decoder.add(id)

  def _logprobs(
    self, entries: list[_Entry], num_top: int
  ) -> dict[str, list[Any]]:
    return dict(
      tokens=[label(self._tokenizer, entry.id) for entry in entries],
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
      name = label(self._tokenizer, one)
      found[_of_id(one) if name in found else name] = _finite(logprob)
    return found


def label(tokenizer: data.Tokenizer, id: int) -> str:
  """The text of a token; part of a character has none, and gets its id."""
  if id == tokenizer.separator_id:
    return _SEPARATOR
  text = tokenizer.decode([id])
  return _of_id(id) if "\ufffd" in text else text


def _of_id(id: int) -> str:
  return f"token_id:{id}"


def _finite(logprob: float) -> float:
  return max(logprob, _LEAST) if math.isfinite(logprob) else _LEAST


def _add(choice: dict[str, Any], part: dict[str, Any]) -> None:
  """Appends a later part of the same choice."""
  choice["text"] += part["text"]
  choice["finish_reason"] = part["finish_reason"]
  for name, values in (part["logprobs"] or {}).items():
    choice["logprobs"][name] += values
  if "token_ids" in part:
    choice["token_ids"] += part["token_ids"]
