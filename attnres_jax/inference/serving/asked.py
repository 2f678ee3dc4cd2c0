# SPDX-License-Identifier: Apache-2.0
"""What a request asks for: checks every field of a body.

A field that this server does not know, or cannot do, is refused by name: a
client that asked for it would otherwise take the answer for what it wanted.
"""

from collections.abc import Sequence
import dataclasses
import difflib
import json
import random
import typing
from typing import Any, NamedTuple

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.config import fields
from attnres_jax.inference import draw
from attnres_jax.inference import engine as engine_lib
from attnres_jax.inference.serving import errors

_MOST_STOPS = 4
_MOST_CHOICES = 128
_SETTINGS = typing.get_type_hints(draw.Settings, include_extras=True)
# Fields of the API with the only value that is accepted.
_FIXED = dict(
  suffix=None, frequency_penalty=0, presence_penalty=0, logit_bias={}
)
_KNOWN = (
  *_SETTINGS, *_FIXED, "model", "prompt", "max_tokens", "n", "best_of",
  "stream", "stream_options", "logprobs", "echo", "stop", "user",
  "past_end", "return_token_ids",
)  # fmt: skip


class Prompt(NamedTuple):
  """A text to continue.

  Attributes:
    ids: of its tokens; a text is opened by the separator of documents.
    opened: whether the first id is such a separator, which is no part of it.
    text: what `echo` repeats.
  """

  ids: list[int]
  opened: bool
  text: str


@dataclasses.dataclass(frozen=True)
class Asked:
  """A checked request for completions.

  Attributes:
    prompts: the texts to continue.
    num_tokens: how many tokens each choice has at most; 0 for none.
    num_choices: of each prompt.
    settings: how the tokens of each choice are drawn.
    stop: a text ends before any of these.
    stop_ids: tokens that end a text.
    logprobs: how many likely tokens are listed; None for no log-probabilities.
    echo: whether texts begin with their prompts.
    stream: whether pieces are sent as they are drawn.
    with_usage: whether the stream ends with the numbers of tokens.
    with_ids: whether the ids of tokens are sent.
  """

  prompts: tuple[Prompt, ...]
  num_tokens: int
  num_choices: int
  settings: tuple[draw.Settings, ...]
  stop: tuple[str, ...]
  stop_ids: frozenset[int]
  logprobs: int | None
  echo: bool
  stream: bool
  with_usage: bool
  with_ids: bool

  def requests(self) -> list[engine_lib.Request]:
    """All choices of the first prompt, then those of the next."""
    return [
      engine_lib.Request(
        prompt.ids,
        # One token is drawn, and dropped, if only the prompt is wanted.
        max(self.num_tokens, 1),
        settings,
        self.stop_ids,
        with_scores=self.echo and self.logprobs is not None,
      )
      for prompt in self.prompts
      for settings in self.settings
    ]


class Reader:
  """Reads requests for one network."""

  def __init__(self, model: str, tokenizer: data.Tokenizer, num_top: int):
    """For the network named `model`, whose engine lists `num_top` tokens."""
    self._model, self._tokenizer, self._num_top = model, tokenizer, num_top

  def completion(self, body: dict[str, Any]) -> Asked:
    """The request of a body.

    Raises:
      ApiError: names the field that cannot be used.
    """
    self.check_names(body, _KNOWN)
    self.check_model(body)
    for name, only in _FIXED.items():
      if body.get(name) not in (None, only):
        raise errors.refuse(
          name, body[name], f"{json.dumps(only)}: this is not supported"
        )
    echo = _value(body, "echo", bool, False)
    num_tokens = _value(body, "max_tokens", fields.Count, 16)
    if not num_tokens and not echo:
      raise errors.refuse(
        "max_tokens", 0, "a number above 0, or echo=true for the prompt alone"
      )
    with errors.of_field("max_tokens"):
      fields.accept("max_tokens", max(num_tokens, 1), fields.Tokens)
    stream = _value(body, "stream", bool, False)
    separator = self._tokenizer.separator_id
    past_end = _value(body, "past_end", bool, False)
    num_choices = _num_choices(body)
    return Asked(
      prompts=tuple(self.prompts(body)),
      num_tokens=num_tokens,
      num_choices=num_choices,
      settings=tuple(_settings(body, num_choices)),
      stop=_stop(body),
      stop_ids=frozenset() if past_end else frozenset([separator]),
      logprobs=self._logprobs(body),
      echo=echo,
      stream=stream,
      with_usage=_with_usage(body, stream),
      with_ids=_value(body, "return_token_ids", bool, False),
    )

  def prompts(self, body: dict[str, Any]) -> list[Prompt]:
    """The prompts of a body: a text, ids, or a list of either.

    Raises:
      ApiError: they are none of these.
    """
    given: Any = body.get("prompt")
    if isinstance(given, str) or _is_list_of(given, int):
      return [self._prompt(given)]
    if _is_list_of(given, str) or _is_list_of(given, list):
      return [self._prompt(one) for one in given]
    raise errors.refuse(
      "prompt", given, "a text, a list of ids, or a list of either, not empty"
    )

  def check_model(self, body: dict[str, Any]) -> None:
    """Refuses any model but the one that is served."""
    name = _value(body, "model", str, self._model)
    if name != self._model:
      raise errors.ApiError(
        404,
        f"model: got {name!r}, expected {self._model!r}, which this server has",
        param="model",
        code="model_not_found",
      )

  def check_names(self, body: dict[str, Any], known: Sequence[str]) -> None:
    """Refuses fields with other names."""
    for name in body.keys() - set(known):
      near = difflib.get_close_matches(name, known, n=1)
      hint = f" (did you mean {near[0]!r}?)" if near else ""
      raise errors.ApiError(
        400,
        f"{name}: this field is not known{hint}; the fields are"
        f" {', '.join(sorted(known))}",
        param=name,
        code="unknown_parameter",
      )

  def _prompt(self, given: Any) -> Prompt:
    if isinstance(given, str):
      try:
        given.encode()
      except UnicodeEncodeError:
        raise errors.refuse("prompt", given, "text that is UTF-8") from None
      with errors.of_field("prompt"):
        ids = self._tokenizer.encode(given).tolist()
      return Prompt([self._tokenizer.separator_id, *ids], True, given)
    if not _is_list_of(given, int):
      raise errors.refuse("prompt", given, "a list of ids, not empty")
    return Prompt(given, False, self._tokenizer.decode(given))

  def _logprobs(self, body: dict[str, Any]) -> int | None:
    if body.get("logprobs") is None:
      return None
    count = _value(body, "logprobs", fields.Count, 0)
    if count > self._num_top:
      raise errors.refuse("logprobs", count, f"0 to {self._num_top}")
    return count


def _value(body: dict[str, Any], name: str, kind: Any, default: Any) -> Any:
  """A field of the body; null is the default, as in the API."""
  value = body.get(name)
  if value is None:
    return default
  with errors.of_field(name):
    return fields.accept(name, value, kind)


def _settings(body: dict[str, Any], count: int) -> list[draw.Settings]:
  """Of each choice of a prompt, which differ in their seeds."""
  values = {
    name: _value(body, name, kind, None) for name, kind in _SETTINGS.items()
  }
  seed = values.pop("seed")
  if seed is None:
    seed = random.getrandbits(32)
  given = {name: value for name, value in values.items() if value is not None}
  return [draw.Settings(**given, seed=(seed + i) % 2**32) for i in range(count)]


def _num_choices(body: dict[str, Any]) -> int:
  count = _value(body, "n", fields.Size, 1)
  if count > _MOST_CHOICES:
    raise errors.refuse("n", count, f"1 to {_MOST_CHOICES}")
  best_of = _value(body, "best_of", fields.Size, count)
  if best_of != count:
    raise errors.refuse(
      "best_of", best_of, f"{count}, the value of n: all choices are returned"
    )
  return count


def _stop(body: dict[str, Any]) -> tuple[str, ...]:
  given = body.get("stop")
  if given is None:
    return ()
  stop = (given,) if isinstance(given, str) else given
  with errors.of_field("stop"):
    stop = fields.accept("stop", stop, tuple[str, ...])
    if not all(stop) or len(stop) > _MOST_STOPS:
      config_lib.fail_argument(
        "stop", given, f"a text or up to {_MOST_STOPS}, which are not empty"
      )
  return stop


def _with_usage(body: dict[str, Any], stream: bool) -> bool:
  options = body.get("stream_options")
  if options is None:
    return False
  if not stream:
    raise errors.refuse("stream_options", options, "null without stream=true")
  if not isinstance(options, dict) or options.keys() - {"include_usage"}:
    raise errors.refuse("stream_options", options, '{"include_usage": true}')
  return _value(options, "include_usage", bool, False)


def _is_list_of(value: Any, kind: type) -> bool:
  """Whether it is a list of such values, and not empty."""
  return bool(
    isinstance(value, list)
    and value
    # In Python, true and false are numbers.
    and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)
  )


def parse_json(body: bytes) -> dict[str, Any]:
  """The object in a body.

  Raises:
    ApiError: it is something else.
  """

  def no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")

  try:
    value = json.loads(body.decode(), parse_constant=no_number)
  except UnicodeDecodeError as error:
    raise errors.ApiError(
      400, f"body: not UTF-8 at byte {error.start}", code="invalid_json"
    ) from None
  except RecursionError:
    raise errors.ApiError(
      400, "body: nested too deeply", code="invalid_json"
    ) from None
  except ValueError as error:
    raise errors.ApiError(
      400, f"body: not JSON: {error}", code="invalid_json"
    ) from None
  if not isinstance(value, dict):
    raise errors.ApiError(
      400,
      f"body: got {type(value).__name__}, expected an object with a prompt",
      code="invalid_json",
    )
  return value
