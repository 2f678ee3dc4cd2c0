# SPDX-License-Identifier: Apache-2.0
"""Errors in the form of the API: a status, and an object that says why."""

from collections.abc import Iterator
import contextlib
from typing import Any

from attnres_jax import config as config_lib

# Longer messages repeat what the client has sent.
_MOST_CHARACTERS = 400


class ApiError(Exception):
  """What a client is told.

  Attributes:
    status: of HTTP.
    kind: "type" of the error object.
    param: the field that is wrong, or None.
    code: for programs, or None.
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
    super().__init__(_shortened(message))
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


def refuse(param: str, value: Any, accepted: str) -> ApiError:
  """The error of a bad field, in the words of other errors here."""
  return ApiError(
    400, f"{param}: got {value!r}, expected {accepted}", param=param
  )


@contextlib.contextmanager
def of_field(param: str) -> Iterator[None]:
  """Turns an error of a check into that of the field of a request."""
  try:
    yield
  except config_lib.ConfigError as error:
    raise ApiError(400, str(error), param=param) from error


def _shortened(message: str) -> str:
  if len(message) <= _MOST_CHARACTERS:
    return message
  half = _MOST_CHARACTERS // 2
  return f"{message[:half]} ... {message[-half:]}"
