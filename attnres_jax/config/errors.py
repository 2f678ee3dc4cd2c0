# SPDX-License-Identifier: Apache-2.0
"""The one-line error of a bad field, and the checks that raise it."""

from collections.abc import Mapping, Sequence
import difflib
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
  """A field of the configuration holds a value that cannot be used."""


def fail(field: str, value: Any, accepted: str) -> NoReturn:
  """Raises the one-line error every bad field gets."""
  raise ConfigError(f"config.{field}: got {value!r}, expected {accepted}")


def choose(field: str, name: str, table: Mapping[str, T]) -> T:
  """Looks `name` up in a registry, or says which names there are."""
  if name not in table:
    hint = difflib.get_close_matches(name, table, n=1)
    suffix = f" (did you mean {hint[0]!r}?)" if hint else ""
    fail(field, name, "one of " + ", ".join(sorted(table)) + suffix)
  return table[name]


def check(ok: bool, field: str, value: Any, accepted: str) -> None:
  if not ok:
    fail(field, value, accepted)


def check_in(field: str, value: str, names: Sequence[str]) -> None:
  choose(field, value, dict.fromkeys(names))


def check_positive(prefix: str, config: Any, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    check(value > 0, f"{prefix}.{name}", value, "a number above 0")


def check_not_negative(prefix: str, config: Any, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    check(value >= 0, f"{prefix}.{name}", value, "a number of at least 0")
