# SPDX-License-Identifier: Apache-2.0
"""Parses and checks the settings of a launcher, `--set name=value`."""

from collections.abc import Mapping
import re
import types
from typing import Any, NamedTuple, NoReturn

from attnres_jax import config as config_lib


class Setting(NamedTuple):
  """A setting of a launcher.

  Attributes:
    text: what it means.
    default: None if the setting is required, or chosen by the launcher.
    kind: of its values: str, int or bool.
    least: of a number.
    required: whether it has to be given.
  """

  text: str
  default: Any = None
  kind: type = str
  least: int = 1
  required: bool = False


def read(
  settings: Mapping[str, Setting], given: Mapping[str, str]
) -> types.SimpleNamespace:
  """A value for every setting, given or by default.

  Raises:
    ConfigError: one cannot be used, or is missing.
  """
  values = {}
  for name, setting in settings.items():
    text = given.get(name)
    if setting.required and not text:
      fail(name, None, setting.text)
    values[name] = (
      setting.default if text is None else _value(name, text, setting)
    )
  return types.SimpleNamespace(**values)


def fail(name: str, value: object, accepted: str) -> NoReturn:
  """Raises the one-line error of a bad setting; None for a missing one."""
  problem = "missing" if value is None else f"got {value!r}"
  raise config_lib.ConfigError(f"--set {name}: {problem}, expected {accepted}")


def _value(name: str, text: str, setting: Setting) -> Any:
  if setting.kind is bool:
    if text not in ("true", "false"):
      fail(name, text, "true or false")
    return text == "true"
  if setting.kind is int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < setting.least:
      fail(name, text, f"a whole number of at least {setting.least}")
    return int(text)
  return text
