# SPDX-License-Identifier: Apache-2.0
"""Configs as dicts and JSON, and how two of them differ."""

from collections.abc import Callable, Mapping
import dataclasses
import json
from typing import Any

from attnres_jax.config import errors
from attnres_jax.config import fields
from attnres_jax.config.run import RunConfig


def to_dict(config: fields.Checked) -> dict[str, Any]:
  """Nested plain dict, ready for JSON, without fields that are None."""
  without_none = lambda pairs: {k: v for k, v in pairs if v is not None}
  return dataclasses.asdict(config, dict_factory=without_none)  # pyrefly: ignore


def to_json(config: fields.Checked) -> str:
  """The content of a file that `from_json` accepts."""
  return json.dumps(to_dict(config), indent=2) + "\n"


def from_json(
  content: str | bytes, path: object, build: Callable[[Any], Any] = dict
) -> Any:
  """What `build`, such as `of_values` of a class, makes of an object in JSON.

  Raises:
    ConfigError: `PATH: key: got VALUE, expected ...`, with dots between the
      keys of objects in objects.
  """
  try:
    values = json.loads(content)
    if not isinstance(values, dict):
      raise ValueError(f"an object, not a {type(values).__name__}")
  except (ValueError, RecursionError) as error:
    text = errors.printable(f"{path}: expected JSON ({error})")
    raise errors.ConfigError(text) from error
  try:
    return build(values)
  except ValueError as error:
    raise errors.ConfigError(errors.printable(f"{path}: {error}")) from error


def affects(name: str) -> frozenset[str]:
  """The effects of a field such as "optim.peak_lr" (`fields.EFFECTS`)."""
  return fields.affected(RunConfig, name)


def affecting(part: fields.Checked, *effects: str) -> dict[str, Any]:
  """The fields of a part that affect one of these, with dotted names below it.

  Args:
    part: of a config, such as its `data`.
    *effects: some of `fields.EFFECTS`.
  """
  values: Any = part
  return {
    name: value
    for name, value in flatten(dataclasses.asdict(values)).items()
    if not fields.affected(type(part), name).isdisjoint(effects)
  }


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested dict to {dotted name: value}."""
  flat = {}
  for key, value in config.items():
    name = f"{prefix}{key}"
    if isinstance(value, Mapping):
      flat.update(flatten(value, name + "."))
    else:
      flat[name] = value
  return flat


def differences(
  old: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
  """Dotted names whose values differ, as {name: (old, new)}; None if absent."""
  old, new = flatten(old), flatten(new)
  return {
    name: (old.get(name), new.get(name))
    for name in sorted(old | new)
    if old.get(name) != new.get(name)
  }


def difference_lines(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
  """A line for each of `differences`."""
  return [
    f"  config.{name}: {old!r} there, {new!r} here"
    for name, (old, new) in changes.items()
  ]
