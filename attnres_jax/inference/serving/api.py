# SPDX-License-Identifier: Apache-2.0
"""Requests of the completions and chat API, and their errors.

A field that this server does not know, or cannot do, is refused by name. A
client that asked for it would otherwise misread the answer. Every number and
every list has an upper bound, which its error names, so that nothing large is
built from a small request.
"""

from collections.abc import Sequence
import difflib
import json
import random
from typing import Annotated, Any

import annotated_types
import pydantic

from attnres_jax import config as config_lib
from attnres_jax.inference import draw
from attnres_jax.inference import engine as engine_lib
from attnres_jax.inference import text as text_lib

# Longer messages repeat what the client has sent.
_MAX_CHARACTERS = 400
_MAX_MESSAGES, _MAX_PARTS = 1000, 1000


# Words of pydantic, and plain ones.
_WORDS = {
  "Input should be ": "",
  "String should have": "text of",
  "List should have": "a list of",
  "Field required": "a value",
  "Extra inputs are not permitted": "no such field",
}


class ApiError(Exception):
  """What a client is told.

  Attributes:
    status: HTTP status.
    kind: "type" of the error object.
    param: the field that is wrong, or None.
    code: name of the error for programs, or None.
    retry_after: seconds until the client should try again, or None.
  """

  def __init__(
    self,
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
    retry_after: int | None = None,
  ):
    half = _MAX_CHARACTERS // 2
    if len(message) > _MAX_CHARACTERS:
      message = f"{message[:half]} ... {message[-half:]}"
    super().__init__(message)
    self.status, self.kind = status, kind
    self.param, self.code = param, code
    self.retry_after = retry_after

  def as_json(self) -> dict[str, Any]:
    return dict(
      error=dict(
        message=str(self), type=self.kind, param=self.param, code=self.code
      )
    )


def busy(message: str, status: int, code: str, seconds: int = 1) -> ApiError:
  """The error of a server that cannot answer now, but may later."""
  kind = "rate_limit_error" if status == 429 else "server_error"
  return ApiError(status, message, kind=kind, code=code, retry_after=seconds)


def failed(status: int, message: str, code: str) -> ApiError:
  """The error of a server that could not answer."""
  return ApiError(status, message, kind="server_error", code=code)


def refuse(param: str, value: Any, accepted: str) -> ApiError:
  """The error of a bad field."""
  return ApiError(
    400, f"{param}: got {_shown(value)}, expected {accepted}", param=param
  )


def _between(least: float, most: float) -> Any:
  return pydantic.Field(ge=least, le=most)


def _some(least: int, most: int | None = None) -> Any:
  """Of a list: its length. One wrong entry is enough; a body may have many."""
  return pydantic.Field(min_length=least, max_length=most, fail_fast=True)


_Stop = Annotated[
  str, pydantic.Field(min_length=1, max_length=text_lib.MAX_STOP_CHARACTERS)
]
_Ids = Annotated[list[int], _some(1)]
_Texts = Annotated[list[str], _some(1)]
_Prompt = str | _Ids | _Texts | Annotated[list[_Ids], _some(1)]
_PROMPTS = "a text, a list of ids, or a list of either, not empty"


class _Request(pydantic.BaseModel):
  """Fields of the API, strictly typed; null stands for the default."""

  model_config = pydantic.ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False
  )

  model: str | None = None

  @pydantic.model_validator(mode="before")
  @classmethod
  def _without_nulls(cls, values: Any) -> Any:
    if not isinstance(values, dict):
      return values
    return {name: v for name, v in values.items() if v is not None}

  @classmethod
  def parse(cls, body: bytes) -> Any:
    """The request of a body.

    Raises:
      ApiError: names the field that cannot be used.
    """
    try:
      return cls.model_validate_json(body)
    except pydantic.ValidationError as error:
      first, *others = error.errors(include_url=False)
      # Of a text or a list of texts, the list says what is wrong.
      same = [e for e in others if e["loc"][:1] == first["loc"][:1]]
      if first["type"] == "string_type" and same:
        first = next((e for e in same if e["type"] != first["type"]), first)
      raise _explained(cls, first) from None


class StreamOptions(_Request):
  """Options of a stream."""

  include_usage: bool = False


class _Generation(_Request):
  """What completions and chats have in common."""

  max_tokens: Annotated[int, _between(0, 1_000_000)] = 16
  temperature: Annotated[float, _between(0, 100)] = 1.0
  top_p: Annotated[float, _between(0, 1)] = 1.0
  top_k: Annotated[int, _between(0, 2**31 - 1)] = 0
  min_p: Annotated[float, _between(0, 1)] = 0.0
  repetition_penalty: Annotated[float, _between(0.01, 100)] = 1.0
  seed: Annotated[int, _between(0, 2**32 - 1)] = pydantic.Field(
    default_factory=lambda: random.getrandbits(32)
  )
  n: Annotated[int, _between(1, 128)] = 1
  stop: _Stop | Annotated[list[_Stop], _some(0, text_lib.MAX_STOPS)] = []
  stream: bool = False
  stream_options: StreamOptions | None = None
  user: str = ""
  past_end: bool = False
  return_token_ids: bool = False
  frequency_penalty: Annotated[float, _between(0, 0)] = 0.0
  presence_penalty: Annotated[float, _between(0, 0)] = 0.0

  @pydantic.model_validator(mode="after")
  def _consistent(self) -> Any:
    if self.stream_options is not None and not self.stream:
      raise refuse("stream_options", "a value", "null without stream=true")
    if not self.max_tokens and not getattr(self, "echo", False):
      raise refuse(
        "max_tokens",
        0,
        "a number from 1 to 1000000, or echo=true for the prompt alone",
      )
    return self

  @property
  def stops(self) -> tuple[str, ...]:
    return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

  @property
  def with_scores(self) -> bool:
    """Whether tokens of the prompt are scored."""
    return False

  @property
  def with_usage(self) -> bool:
    return self.stream_options is not None and self.stream_options.include_usage

  def requests(
    self, prompts: Sequence[Sequence[int]], end_ids: Sequence[int]
  ) -> list[engine_lib.Request]:
    """All choices of the first prompt, then of the next.

    They share a seed and differ in their streams.

    Args:
      prompts: ids of each.
      end_ids: tokens that end a text.
    """
    settings = draw.Settings(
      self.temperature,
      self.top_k,
      self.top_p,
      self.min_p,
      self.repetition_penalty,
      self.seed,
    )
    return [
      engine_lib.Request(
        ids,
        # One token is drawn, and dropped, if only the prompt is wanted.
        max(self.max_tokens, 1),
        settings,
        frozenset() if self.past_end else frozenset(end_ids),
        stream=number * self.n + choice,
        with_scores=self.with_scores,
      )
      for number, ids in enumerate(prompts)
      for choice in range(self.n)
    ]


class Completion(_Generation):
  """The body of POST /v1/completions."""

  prompt: _Prompt | None = None
  echo: bool = False
  logprobs: Annotated[int, _between(0, 2**31 - 1)] | None = None
  parse_special: bool = False

  @property
  def with_scores(self) -> bool:
    """Whether tokens of the prompt are scored."""
    return self.echo and self.logprobs is not None


class _Part(_Request):
  type: str
  text: Annotated[str, pydantic.Field(max_length=2**20)]


class _Message(_Request):
  role: Annotated[str, pydantic.Field(max_length=100)]
  content: str | Annotated[list[_Part], _some(0, _MAX_PARTS)]
  name: str | None = None


class Chat(_Generation):
  """The body of POST /v1/chat/completions."""

  messages: Annotated[list[_Message], _some(1, _MAX_MESSAGES)]
  max_completion_tokens: Annotated[int, _between(1, 1_000_000)] | None = None

  def conversation(self) -> list[dict[str, str]]:
    """Roles and texts, as templates take them."""
    return [
      dict(
        role=message.role,
        content=message.content
        if isinstance(message.content, str)
        else "".join(part.text for part in message.content),
      )
      for message in self.messages
    ]


class Depth(_Request):
  """The body of POST /depth_weights."""

  prompt: _Prompt | None = None


def prompts_of(
  given: Any, vocab_size: int, most: int
) -> Sequence[str | list[int]]:
  """The prompts of a field: a text, ids, or a list of either.

  Args:
    given: the value of the field.
    vocab_size: every id is smaller.
    most: most prompts.

  Raises:
    ApiError: the value is something else.
  """
  if given is None:
    raise refuse("prompt", None, _PROMPTS)
  alone = isinstance(given, str) or isinstance(given[0], int)
  several = [given] if alone else given
  if len(several) > most:
    raise refuse(
      "prompt",
      f"{len(several)} texts",
      f"at most {most}, by the slots and queue of this server",
    )
  for one in several:
    ids = [] if isinstance(one, str) else one
    wrong = next((id for id in ids if not 0 <= id < vocab_size), None)
    if wrong is not None:
      raise refuse("prompt", wrong, f"ids below {vocab_size}")
  return several


def of_config_error(error: config_lib.ConfigError) -> ApiError:
  """The error of a value that the engine refuses."""
  words = str(error).removeprefix("--")
  if words.startswith("num_tokens:"):
    words = words.replace("num_tokens", "max_tokens", 1)
  return ApiError(400, words, param=words.partition(":")[0])


def _explained(model: type[_Request], error: Any) -> ApiError:
  """The error of the first field that pydantic refuses."""
  where = [part for part in error["loc"] if isinstance(part, str)]
  if error["type"] == "json_invalid":
    return ApiError(400, f"body: {error['msg']}", code="invalid_json")
  if not where:
    return ApiError(
      400,
      f"body: got {_shown(error['input'])}, expected an object",
      code="invalid_json",
    )
  name = where[0]
  if error["type"] == "extra_forbidden" and len(where) == 1:
    known = sorted(model.model_fields)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return ApiError(
      400,
      f"{name}: this field is not known{hint}; the fields are"
      f" {', '.join(known)}",
      param=name,
      code="unknown_parameter",
    )
  if name == "prompt":
    return refuse(name, error["input"], _PROMPTS)
  words = error["msg"].partition(" after validation")[0]
  for given, plain in _WORDS.items():
    words = words.replace(given, plain)
  field = model.model_fields.get(name)
  limits = [*_limits(field.annotation), *_limits(field)] if field else []
  if limits and len(error["loc"]) == 1:
    words = f"a number from {limits[0]} to {limits[1]}"
    if limits[0] == limits[1]:
      words = f"{limits[0]}: other values are not supported"
  return refuse(name, error["input"], words)


def _limits(node: Any) -> list[Any]:
  """The least and the most of a number."""
  found = [
    getattr(one, name)
    for one in getattr(node, "metadata", [])
    for kind, name in ((annotated_types.Ge, "ge"), (annotated_types.Le, "le"))
    if isinstance(one, kind)
  ]
  for inner in getattr(node, "__args__", ()):
    found += _limits(inner)
    for one in getattr(inner, "__metadata__", ()):
      found += _limits(one)
  return found


def _shown(value: Any) -> str:
  """A value for an error, cut before it is written out."""
  if isinstance(value, (list, str)) and len(value) > 200:
    value = value[:200]
  try:
    return json.dumps(value)
  except (TypeError, ValueError):
    return repr(value)
