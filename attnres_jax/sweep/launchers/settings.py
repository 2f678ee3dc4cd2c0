# SPDX-License-Identifier: Apache-2.0
"""Settings of a launcher, `--set name=value`, read and refused alike."""

from collections.abc import Mapping
import re
from typing import NoReturn

from attnres_jax import config as config_lib


def number(
  given: Mapping[str, str], name: str, default: int, least: int = 1
) -> int:
  """A whole number; `default` where it is not given.

  Raises:
    ConfigError: it is none, or less than `least`.
  """
  text = given.get(name, str(default))
  if not re.fullmatch(r"\d+", text) or int(text) < least:
    fail(name, text, f"a whole number of at least {least}")
  return int(text)


def switch(given: Mapping[str, str], name: str, default: bool) -> bool:
  """True or false; `default` where it is not given.

  Raises:
    ConfigError: it is neither.
  """
  text = given.get(name, str(default).lower())
  if text not in ("true", "false"):
    fail(name, text, "true or false")
  return text == "true"


def fail(name: str, value: object, accepted: str) -> NoReturn:
  """Raises the one-line error of a bad setting; None for a missing one."""
  found = "missing" if value is None else f"got {value!r}"
  raise config_lib.ConfigError(f"--set {name}: {found}, expected {accepted}")
