# SPDX-License-Identifier: Apache-2.0
"""The one-line error of a bad field, and the checks that raise it."""

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import difflib
import traceback
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
  """A field of the configuration has an invalid value."""


class RunError(RuntimeError):
  """A run with a valid description cannot continue."""


def without_jax_notes(error: BaseException) -> list[str]:
  """The notes of an error; removes the notes of JAX.

  Below a line of dashes, JAX says that it hides its frames.
  """
  for each in chain(error):
    notes = getattr(each, "__notes__", [])
    notes[:] = [note for note in notes if not note.startswith("-----")]
  return list(getattr(error, "__notes__", []))


def chain(error: BaseException | None) -> Iterator[BaseException]:
  """An error, its cause, and so on, each once: a chain may be a ring."""
  seen: list[BaseException] = []
  while error is not None and error not in seen:
    seen.append(error)
    yield error
    error = error.__cause__ or error.__context__


def fail(field: str, value: Any, accepted: str) -> NoReturn:
  """Raises the one-line error of a bad field."""
  fail_argument(f"config.{field}", value, accepted)


def fail_argument(name: str, value: Any, accepted: str) -> NoReturn:
  """Raises a ConfigError about an argument, such as "--workdir"."""
  raise ConfigError(printable(f"{name}: got {value!r}, expected {accepted}"))


def printable(text: str) -> str:
  """A line of what files hold and libraries say, which may steer terminals."""
  return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def choose(
  field: str,
  name: str,
  table: Mapping[str, T],
  families: Mapping[str, Iterable[str]] | None = None,
) -> T:
  """Looks up `name` in a registry; the error lists the names, by family."""
  argument = field if field.startswith("--") else f"config.{field}"
  check_in(argument, name, table, families)
  return table[name]


@contextlib.contextmanager
def running(path: str) -> Iterator[None]:
  """Says in one line where in the user's file `path` an exception came from."""
  try:
    yield
  except ConfigError:
    raise
  except (Exception, SystemExit) as error:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f":{frame.lineno}" for frame in frames if frame.filename == path]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    where = path + (lines[-1] if lines else "")
    raise ConfigError(f"config file failed at {where}: {text}") from error


def check_in(
  argument: str,
  name: str,
  names: Iterable[str],
  families: Mapping[str, Iterable[str]] | None = None,
) -> None:
  """Raises unless the value `name` of an argument is one of `names`.

  Suggests the closest one; `families` list the same names.
  """
  names = list(names)
  if name not in names:
    hint = difflib.get_close_matches(name, names, n=1)
    suffix = f" (did you mean {hint[0]!r}?)" if hint else ""
    listed = ", ".join(sorted(names))
    if families:
      listed = "; ".join(f"{f}: {', '.join(n)}" for f, n in families.items())
    fail_argument(argument, name, f"one of {listed}{suffix}")
