# SPDX-License-Identifier: Apache-2.0
"""Requests of the completions API, and their errors.

A field that this server does not know, or cannot do, is refused by name. A
client that asked for it would otherwise misread the answer. Every number and
every list has an upper bound, which its error names, so that nothing large is
built from a small request.
"""

from collections.abc import Sequence
import random
from typing import Annotated, Any

import pydantic

from attnres_jax import config as config_lib
from attnres_jax.inference import draw
from attnres_jax.inference import engine as engine_lib

# Longer messages repeat what the client has sent.
_MAX_CHARACTERS = 400
_CODES = {
  "json_invalid": "invalid_json",
  "extra_forbidden": "unknown_parameter",
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
    400, f"{param}: got {value!r}, expected {accepted}", param=param
  )


def _between(least: float, most: float) -> Any:
  return pydantic.Field(ge=least, le=most)


def _some(least: int, most: int | None = None) -> Any:
  """Of a list: its length. One wrong entry is enough; a body may have many."""
  return pydantic.Field(min_length=least, max_length=most, fail_fast=True)


# Every drawn token is compared with all stop strings.
_Stop = Annotated[str, pydantic.Field(min_length=1, max_length=1000)]
_Ids = Annotated[list[int], _some(1)]
_Texts = Annotated[list[str], _some(1)]
_Prompt = str | _Ids | _Texts | Annotated[list[_Ids], _some(1)]


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
      first, *_ = error.errors(include_url=False, include_input=False)
      where = next((part for part in first["loc"]), None)
      param = where if isinstance(where, str) else None
      raise ApiError(
        400,
        f"{param or 'body'}: {first['msg']}",
        param=param,
        code=_CODES.get(first["type"]),
      ) from None


class StreamOptions(_Request):
  """Options of a stream."""

  include_usage: bool = False


class Completion(_Request):
  """The body of POST /v1/completions."""

  prompt: _Prompt
  max_tokens: Annotated[int, _between(1, 1_000_000)] = 16
  temperature: Annotated[float, _between(0, 100)] = 1.0
  top_p: Annotated[float, _between(0, 1)] = 1.0
  top_k: Annotated[int, _between(0, 2**31 - 1)] = 0
  seed: Annotated[int, _between(0, 2**32 - 1)] = pydantic.Field(
    default_factory=lambda: random.getrandbits(32)
  )
  n: Annotated[int, _between(1, 128)] = 1
  stop: _Stop | Annotated[list[_Stop], _some(0, 16)] = []
  logprobs: Annotated[int, _between(0, 2**31 - 1)] | None = None
  stream: bool = False
  stream_options: StreamOptions | None = None
  user: str = ""
  past_end: bool = False
  parse_special: bool = False
  return_token_ids: bool = False
  frequency_penalty: Annotated[float, _between(0, 0)] = 0.0
  presence_penalty: Annotated[float, _between(0, 0)] = 0.0

  @property
  def stops(self) -> tuple[str, ...]:
    return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

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
      self.temperature, self.top_k, self.top_p, self.seed
    )
    return [
      engine_lib.Request(
        ids,
        self.max_tokens,
        settings,
        frozenset() if self.past_end else frozenset(end_ids),
        stream=number * self.n + choice,
      )
      for number, ids in enumerate(prompts)
      for choice in range(self.n)
    ]


class Depth(_Request):
  """The body of POST /depth_weights."""

  prompt: _Prompt


def of_config_error(error: config_lib.ConfigError) -> ApiError:
  """The error of a value that the engine refuses."""
  words = str(error).removeprefix("--")
  if words.startswith("num_tokens:"):
    words = words.replace("num_tokens", "max_tokens", 1)
  return ApiError(400, words, param=words.partition(":")[0])
