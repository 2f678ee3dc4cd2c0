# SPDX-License-Identifier: Apache-2.0
"""Turns a config file and overrides into a checked `RunConfig` and JSON."""

import ast
from collections.abc import Mapping
import dataclasses
import importlib.machinery
import json
import pathlib
import types
import typing
from typing import Any, TypeVar

import ml_collections

from attnres_jax.config.errors import ConfigError
from attnres_jax.config.errors import choose
from attnres_jax.config.errors import fail
from attnres_jax.config.errors import running
from attnres_jax.config.run import BYTE_VOCAB_SIZE
from attnres_jax.config.run import RunConfig

T = TypeVar("T")
# What stands for the folder of configs, and that folder: a link in a clone.
_INSTALLED = "attnres_jax"
_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
# False, true, and so on.
_TRUTHS = ("false", "true", "0", "1", "no", "yes")


def default_config() -> ml_collections.ConfigDict:
  """The defaults of `RunConfig` as an unlocked ConfigDict, for editing."""
  return ml_collections.ConfigDict(to_dict(RunConfig()))


def build_run_config(config: Mapping[str, Any]) -> RunConfig:
  """Checks a ConfigDict (or plain nested dict) and freezes it.

  Raises:
    ConfigError: naming the first bad field, its value and what is accepted.
  """
  if isinstance(config, ml_collections.ConfigDict):
    config = config.to_dict()
  run = _build(RunConfig, config, "")
  if run.data.tokenizer == "bytes":
    run = run.with_vocab_size(BYTE_VOCAB_SIZE)
  return run


def load_config(
  spec: str, overrides: Mapping[str, Any] | None = None
) -> RunConfig:
  """Loads `path/to/file.py:key=value,...`, overrides fields, and freezes it.

  Args:
    spec: a config file with a `get_config(arg)`, then optionally a colon and
      the argument, as on the command line; see `split_spec`.
    overrides: dotted field name to value, such as {"optim.peak_lr": 3e-4}.

  Raises:
    ConfigError: no such file, field or accepted value.
  """
  path, arg = split_spec(spec)
  get_config = load_file(path).get_config
  with running(path):
    config = get_config(arg)
  if not isinstance(config, ml_collections.ConfigDict):
    raise ConfigError(
      f"config file {path!r}: get_config returned {type(config).__name__},"
      " expected a ConfigDict"
    )
  values = config.to_dict()
  for name, value in (overrides or {}).items():
    node, leaf = _find(values, name, value)
    node[leaf] = value
  return build_run_config(values)


def split_spec(spec: str) -> tuple[str, str]:
  """The file and the argument of `path/to/file.py:key=value,...`.

  `attnres_jax:lm:key=value,...` is a file that was installed with the library,
  that of configs/lm.py.

  Raises:
    ConfigError: no such file was installed.
  """
  path, _, arg = spec.partition(":")
  if path != _INSTALLED:
    return path, arg
  name, _, arg = arg.partition(":")
  known = {file.stem: str(file) for file in sorted(_CONFIGS.glob("*.py"))}
  if name not in known:
    listed = ", ".join(f"{_INSTALLED}:{name}" for name in known)
    raise ConfigError(f"config {spec!r}: not found, expected one of {listed}")
  return known[name], arg


def parse_field(name: str, text: str) -> Any:
  """Parses `text` as the type of a field such as "optim.peak_lr".

  Raises:
    ConfigError: there is no such field, or the text does not fit its type.
  """
  node, leaf = _find(to_dict(RunConfig()), name, text)
  default = node[leaf]
  if isinstance(default, dict):
    fail(name, text, "one of its fields: " + ", ".join(default))
  try:
    return _parse_value(text, default)
  except ValueError:
    fail(name, text, f"a value of type {type(default).__name__}")


def load_file(path: str) -> Any:
  """Loads a config file as a module.

  Raises:
    ConfigError: no such file, it fails, or it has no `get_config`.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    raise ConfigError(f"config file {path!r}: not found")
  loader = importlib.machinery.SourceFileLoader(f"config_{file.stem}", path)
  module = types.ModuleType(loader.name)
  module.__file__ = path
  with running(path):
    loader.exec_module(module)
  if not hasattr(module, "get_config"):
    raise ConfigError(f"config file {path!r}: defines no get_config(arg)")
  return module


def to_dict(config: RunConfig) -> dict[str, Any]:
  """Nested plain dict, ready for JSON."""
  return dataclasses.asdict(config)


def to_json(config: RunConfig) -> str:
  return json.dumps(to_dict(config), indent=2) + "\n"


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


def parse_arg(arg: str | None, **defaults: Any) -> types.SimpleNamespace:
  """Parses `key=value,flag` against defaults that give each key its type.

  A key without a value is the boolean True. Used by `get_config(arg)`.

  Raises:
    ConfigError: an unknown key, or a value that does not fit the default's
      type.
  """
  values = dict(defaults)
  for item in filter(None, (arg or "").split(",")):
    key, given, text = item.partition("=")
    if key not in defaults:
      raise ConfigError(
        f"config argument {key!r}: unknown, expected one of "
        + ", ".join(sorted(defaults))
      )
    try:
      values[key] = _parse_value(text if given else "true", defaults[key])
    except ValueError as error:
      kind = type(defaults[key]).__name__
      raise ConfigError(
        f"config argument {key!r}: got {text if given else 'true'!r}, expected"
        f" {kind}"
      ) from error
  return types.SimpleNamespace(**values)


def _parse_value(text: str, default: Any) -> Any:
  """`text` as the type of the default; raises ValueError if it does not fit."""
  if isinstance(default, bool):
    return bool(_TRUTHS.index(text.lower()) % 2)
  if isinstance(default, tuple):
    try:
      return tuple(ast.literal_eval(text))
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
      raise ValueError(text) from error
  return type(default)(text)


def _build(cls: type[T], values: Mapping[str, Any], prefix: str) -> T:
  kinds = typing.get_type_hints(cls)
  given = {}
  for name, value in values.items():
    kind = choose(f"{prefix}{name}", str(name), kinds)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
      value = _build(kind, value, f"{prefix}{name}.")
    given[name] = value
  return cls(**given)


def _find(
  config: dict[str, Any], name: str, value: Any
) -> tuple[dict[str, Any], str]:
  """The dict that contains the field of a dotted name, and its last part."""
  *parents, leaf = name.split(".")
  node = config
  for depth, part in enumerate(parents):
    node = choose(".".join(parents[: depth + 1]), part, node)
    if not isinstance(node, dict):
      fail(name, value, "the name of a field")
  choose(name, leaf, node)
  return node, leaf
