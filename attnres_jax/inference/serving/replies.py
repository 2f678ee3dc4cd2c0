# SPDX-License-Identifier: Apache-2.0
"""Answers in the form of the API, from the pieces of texts.

A whole answer is the sum of the parts that a stream would send, so both are
made by `Answer.part`.
"""

from collections.abc import Callable, Iterable, Sequence
import math
import time
from typing import Any
import uuid

from attnres_jax.data import text_format as text_format_lib
from attnres_jax.inference import engine as engine_lib
from attnres_jax.inference import text
from attnres_jax.inference.serving import api

# In the API, the least log-probability.
_LEAST = -9999.0


class Answer:
  """The answer to one request for completions.

  Attributes:
    usage: numbers of tokens so far, as the API counts them.
  """

  def __init__(
    self,
    asked: api.Completion,
    prompts: Sequence[list[int]],
    label: Callable[[int], str],
    model: str,
  ):
    """For the answer of `model`; `label` gives the text of one token."""
    self._asked, self._prompts = asked, prompts
    self._label, self._num_top = label, asked.logprobs
    self._head = dict(
      id=f"cmpl-{uuid.uuid4().hex}",
      object="text_completion",
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

  def part(self, piece: text.Piece) -> dict[str, Any]:
    """What one piece adds to its choice."""
    prompt = self._prompts[piece.index // self._asked.n]
    choice: dict[str, Any] = dict(
      index=piece.index,
      text=piece.text,
      logprobs=None,
      finish_reason=piece.finish,
    )
    self._drawn_tokens += 1
    if piece.token.first and piece.index % self._asked.n == 0:
      self._prompt_tokens += len(prompt)
    if self._num_top is not None:
      choice["logprobs"] = self._logprobs(piece.token, piece.offset)
    if self._asked.return_token_ids:
      choice["token_ids"] = [piece.token.id]
      if piece.token.first:
        choice["prompt_token_ids"] = prompt
    return choice

  def is_silent(self, part: dict[str, Any]) -> bool:
    """Whether a stream may leave it out."""
    ids = self._asked.return_token_ids
    wanted = ids or part["logprobs"] is not None
    return not (wanted or part["text"] or part["finish_reason"])

  def chunk(self, part: dict[str, Any] | None) -> dict[str, Any]:
    """An event of a stream; without a part, the last one, with the usage."""
    choices = [] if part is None else [part]
    event: dict[str, Any] = self._head | dict(choices=choices)
    if self._asked.with_usage:
      event["usage"] = self.usage if part is None else None
    return event

  def whole(self, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The answer without a stream."""
    choices: dict[int, list[dict[str, Any]]] = {}
    for part in parts:
      choices.setdefault(part["index"], []).append(part)
    in_order = [_sum(choices[index]) for index in sorted(choices)]
    return self._head | dict(choices=in_order, usage=self.usage)

  def _logprobs(
    self, token: engine_lib.Token, offset: int
  ) -> dict[str, list[Any]]:
    """Of a token and, as in the API, the likely ones with it."""
    top: dict[str, float] = {}
    ids = dict([*token.top[: self._num_top], (token.id, token.logprob)])
    for one, logprob in ids.items():
      name = self._label(one)
      name = text_format_lib.label_of_id(one) if name in top else name
      top[name] = _finite(logprob)
    return dict(
      tokens=[self._label(token.id)],
      token_logprobs=[_finite(token.logprob)],
      top_logprobs=[top],
      text_offset=[offset],
    )


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
