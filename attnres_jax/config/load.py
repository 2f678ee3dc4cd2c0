# SPDX-License-Identifier: Apache-2.0
"""Turns a config file and overrides into a checked `RunConfig` and JSON."""

import ast
from collections.abc import Callable, Mapping
import dataclasses
import importlib.machinery
import inspect
import operator
import os
import pathlib
import re
import sys
import types
import typing
from typing import Any

from etils import epath
import ml_collections

from attnres_jax.config import dicts
from attnres_jax.config import dotted
from attnres_jax.config import fields as fields_lib
from attnres_jax.config.errors import ConfigError
from attnres_jax.config.errors import choose
from attnres_jax.config.errors import fail
from attnres_jax.config.errors import running
from attnres_jax.config.residual import ResidualConfig
from attnres_jax.config.run import RunConfig
from attnres_jax.config.schemes import SCHEMES

# What stands for the folder of configs, and that folder: a link in a clone.
_INSTALLED = "attnres_jax"
_RESIDUAL = "model.residual."
_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
# The beginning of a tuple of words as Python writes it, not of an expression
# such as (a|b); and commas between words, not those of a{1,2}.
_QUOTED = re.compile(r"""\s*[\[(]?\s*(['"]|[\])]\s*$)""")
_COMMA = re.compile(r",(?![^({\[]*[)}\]])")
# False, true, and so on.
_TRUTHS = ("false", "true", "0", "1", "no", "yes")


@dataclasses.dataclass(frozen=True)
class Source:
  """A config as a command line names it: a spec, see `split_spec`, and fields.

  Fields are dotted names with their values as text, of --config.FIELD=VALUE.
  """

  spec: str
  fields: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def values(self) -> dict[str, Any]:
    """The fields with values of their types."""
    return {name: parse_field(name, t) for name, t in self.fields.items()}

  def load(self) -> RunConfig:
    """`load_config` of it."""
    return load_config(self.spec, self.values())

  def __str__(self) -> str:
    flags = (f"--config.{name}={text}" for name, text in self.fields.items())
    return " ".join([self.spec, *flags])


def default_config() -> ml_collections.ConfigDict:
  """The defaults of `RunConfig` as an unlocked ConfigDict, for editing."""
  return ml_collections.ConfigDict(dicts.to_dict(RunConfig()))


def follow(
  config: ml_collections.ConfigDict, name: str, function: Callable[[Any], Any]
) -> ml_collections.FieldReference:
  """A value that is computed from a field, until a value of its own is given.

  So `config.name = follow(config, "seed", "run{}".format)` is "run7" under
  `--config.seed=7`, and "x" under `--config.name=x`.
  """
  *parents, leaf = name.split(".")
  for parent in parents:
    config = config[parent]
  reference = config.get_ref(leaf)
  # An operation sees the reference's own value first, which has no meaning
  # here and only gives the field its type.
  follows = types.SimpleNamespace(
    fn=lambda _, value: function(value), args=(reference,)
  )
  return ml_collections.FieldReference(function(reference.get()), op=follows)


def build_run_config(config: Mapping[str, Any]) -> RunConfig:
  """Checks a ConfigDict (or plain nested dict) and freezes it.

  Raises:
    ConfigError: naming the first bad field, its value and what is accepted.
  """
  if isinstance(config, ml_collections.ConfigDict):
    config = config.to_dict()
  return RunConfig.of_values(config)


def residual_config(
  name: str = "block_attnres", **options: Any
) -> ResidualConfig:
  """A residual scheme with some of its options.

  Options of other schemes have no place in it: at their defaults, or without an
  effect on the function, they are left out.

  Raises:
    ConfigError: there is no such scheme, it has no such option, or not such a
      value of it.
  """
  cls = _options_of(fields_lib.accept(f"config.{_RESIDUAL}name", name, str))
  kinds = fields_lib.kinds(cls)
  taken = {o: value for o, value in options.items() if o in kinds}
  given = {o: getattr(options[o], "__dict__", options[o]) for o in options}
  for option, value in dicts.flatten(given).items():
    if option.split(".")[0] in kinds:
      continue
    dotted.kind_of(_RESIDUAL + option, value)
    owner = fields_lib.with_field(ResidualConfig, option.split(".")[0])
    default = operator.attrgetter(option)(owner())
    effects = fields_lib.affected(ResidualConfig, option)
    if value != default and "execution" not in effects:
      expected = f"{default!r} with {_RESIDUAL}name={name!r}"
      fail(_RESIDUAL + option, value, expected)
  return cls(name=name, **taken)


def under(residual: ResidualConfig, name: str) -> ResidualConfig:
  """Another scheme, with the options that both have."""
  options = fields_lib.kinds(_options_of(name)).keys() - {"name"}
  both = {o: getattr(residual, o) for o in options if hasattr(residual, o)}
  return residual_config(name, **both)


def _options_of(name: str) -> type[ResidualConfig]:
  """The class of a scheme's options; else an error lists the schemes."""
  field = f"{_RESIDUAL}name"
  if (
    dotted.REGISTRY not in sys.modules
  ):  # Else a config file may have added some.
    choose(field, name, {n: n for f in SCHEMES.values() for n in f}, SCHEMES)
  from attnres_jax.models import residuals

  return residuals.scheme_named(name).Options


def load_config(
  spec: str,
  overrides: Mapping[str, Any] | None = None,
  by_hand: bool = True,
) -> RunConfig:
  """Loads `path/to/file.py:key=value,...`, overrides fields, and freezes it.

  Fields that the file derives from others by references
  (`ConfigDict.get_ref`) follow their overrides.

  Args:
    spec: a config file, or the config.json of a run; see `split_spec`.
    overrides: dotted field name to value, such as {"optim.peak_lr": 3e-4}.
    by_hand: whether a person has set these for this run, so that they have to
      act in it.

  Raises:
    ConfigError: no such file, field or accepted value, or the values do not
      describe a network and an optimiser (`attnres_jax.train.described`).
  """
  path, arg = split_spec(spec)
  if path.endswith(".json"):
    config = ml_collections.ConfigDict(_read_json(path, arg))
  else:
    get_config = load_file(path).get_config
    with running(path):
      config = _call(get_config, arg)
    if not isinstance(config, ml_collections.ConfigDict):
      raise ConfigError(
        f"config file {path!r}: get_config returned {type(config).__name__},"
        " expected a ConfigDict"
      )
    # Not frozen; its references stay live.
    unfrozen: Any = ml_collections.ConfigDict
    config = unfrozen(config)
  with running(path), config.unlocked(), config.ignore_type():
    for name, value in (overrides or {}).items():
      _set(config, name, value)
    for name, value in (overrides or {}).items():
      for other, default in dotted.undone(name) if value else ():
        if other not in (overrides or {}):
          _set(config, other, default)
    values = config.to_dict()
  run = build_run_config(values)
  given = overrides if overrides and by_hand else {}
  for name, value in given.items():
    if not name.startswith(_RESIDUAL):
      fields_lib.check_acts(run, name, value)
  # Last, since it imports JAX. Names of schemes, mixers and optimisers are keys
  # of registries, which a config file may extend.
  from attnres_jax.train import described

  described.check_new(run, given)
  return run


def split_spec(spec: str) -> tuple[str, str]:
  """The file and the argument of `path/to/file.py:key=value,...`.

  `attnres_jax:lm:key=value,...` is a file that was installed with the library,
  configs/lm.py. A path may begin with ~ and, to a config.json, with gs:// or
  s3://.

  Raises:
    ConfigError: no such file was installed.
  """
  scheme, store, rest = spec.partition("://")
  path, _, arg = (rest if store else spec).partition(":")
  if path != _INSTALLED:
    return os.path.expanduser(scheme + store + path if store else path), arg
  name, _, arg = arg.partition(":")
  files = {file.stem: str(file) for file in sorted(_CONFIGS.glob("*.py"))}
  if name not in files:
    listed = ", ".join(f"{_INSTALLED}:{name}" for name in files)
    raise ConfigError(f"config {spec!r}: not found, expected one of {listed}")
  return files[name], arg


def parse_field(name: str, text: str) -> Any:
  """Parses `text` as the type of a field such as "optim.peak_lr".

  Tuples are written as in Python, or as words between commas.

  Raises:
    ConfigError: there is no such field, or the text does not fit its type.
  """
  kind = dotted.kind_of(name, text)
  if dataclasses.is_dataclass(kind):
    names = ", ".join(field.name for field in dataclasses.fields(kind))
    fail(name, text, f"one of its fields: {names}")
  try:
    return _parse(text, kind)
  except (
    ValueError, SyntaxError, TypeError, MemoryError, RecursionError, re.error,
  ):  # fmt: skip
    fail(name, text, f"a value of type {fields_lib.words(kind)}")


def parse_values(name: str, text: str) -> list[Any]:
  """Parses values between commas, each like that of a field or argument.

  Args:
    name: of a field, or of an argument of a config file, whose values remain
      text.
    text: commas within brackets do not count.

  Raises:
    ConfigError: as `parse_field`.
  """
  parts = [part.strip() for part in _COMMA.split(text)]
  is_field = "." in name or name in RunConfig.__dataclass_fields__
  return [parse_field(name, part) if is_field else part for part in parts]


def load_file(path: str) -> Any:
  """Loads a config file as a module.

  Raises:
    ConfigError: no such file, it fails, or it has no `get_config`.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    raise ConfigError(
      f"config file {path!r}: not found (outside of a clone, configs/lm.py is"
      f" {_INSTALLED}:lm)"
    )
  loader = importlib.machinery.SourceFileLoader(f"config_{file.stem}", path)
  module = types.ModuleType(loader.name)
  module.__file__ = path
  # Dataclasses look up the names in their annotations there.
  sys.modules[loader.name] = module
  with running(path):
    loader.exec_module(module)
  if not hasattr(module, "get_config"):
    raise ConfigError(f"config file {path!r}: defines no get_config(arg)")
  return module


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
        + dotted.hint(key)
      )
    try:
      values[key] = _parse(text if given else "true", type(defaults[key]))
    except ValueError as error:
      kind = type(defaults[key]).__name__
      raise ConfigError(
        f"config argument {key!r}: got {text if given else 'true'!r}, expected"
        f" {kind}"
      ) from error
  return types.SimpleNamespace(**values)


def _parse(text: str, kind: Any) -> Any:
  """`text` as a value of a type; raises ValueError if it does not fit."""
  kind = fields_lib.plain(kind)
  args = typing.get_args(kind)
  if kind is bool:
    return bool(_TRUTHS.index(text.lower()) % 2)
  if typing.get_origin(kind) is tuple:
    words = fields_lib.plain(args[0]) is str
    if words and not _QUOTED.match(text):
      items = tuple(filter(None, map(str.strip, _COMMA.split(text))))
      for word in items if text.strip()[:1] in ("(", "[") else ():
        re.compile(word)  # Else it is half a tuple, such as (1, 2
      return items
    value = ast.literal_eval(text)
    if isinstance(value, str):
      raise ValueError(text)
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
  return fields_lib.integer(text) if kind is int else kind(text)


def _read_json(path: str, arg: str) -> dict[str, Any]:
  """The config.json of a run."""
  if arg:
    raise ConfigError(f"config file {path!r}: got {arg!r}, takes no argument")
  with running(path):
    file = epath.Path(path)
    if not file.is_file():  # Nor a device, which has no end.
      raise ConfigError(f"config file {path!r}: not found")
    content = file.read_bytes()
  # A run's plan, as its mesh, is part of it.
  return dicts.to_dict(dicts.from_json(content, path, RunConfig.of_values))


def _call(get_config: Any, arg: str) -> Any:
  """Calls it with the argument, if it takes one."""
  try:
    inspect.signature(get_config).bind(arg)
  except TypeError:
    if arg:
      raise ConfigError(f"got {arg!r}, get_config takes no argument") from None
    return get_config()
  return get_config(arg)


def _set(config: ml_collections.ConfigDict, name: str, value: Any) -> None:
  """Replaces a field, or the value that a reference in its place points to."""
  dotted.kind_of(name, value)
  *parents, leaf = name.split(".")
  for part in parents:
    if part not in config:
      config[part] = ml_collections.ConfigDict()
    config = config[part]
  config[leaf] = value
