# SPDX-License-Identifier: Apache-2.0
"""What all commands share: one kit of flags, and one line for every error.

`run` calls a command and returns its exit status: that of `exits`, which says
whether to try again (2 for invalid input), or 130 for an interrupt. Instead of
a traceback, one line on stderr says what was wrong.

`Parser` reads the flags of every command. Those that need a config take
--config=FILE:ARGUMENTS and --config.FIELD=VALUE, which arrive as a
`config.Source`. A flag without effect is refused, and ~ is expanded.

Commands import JAX when their flags and config are read, not before: a wrong
one is told at once, not after seconds of imports.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import os
import re
import sys
import typing
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from attnres_jax import config as config_lib
from attnres_jax.common import exits
from attnres_jax.common import plans
from attnres_jax.common import text_table
from attnres_jax.config import describe
from attnres_jax.config import dotted
from attnres_jax.config import errors
from attnres_jax.config import fields as fields_lib

T = TypeVar("T")
# Types of arguments whose text is no path, so that ~ stays.
text = str.__call__
_FIELD = "--config.FIELD"


def run(command: Callable[..., Any], *args: Any) -> int:
  """Calls a command; returns its exit status, 0 for None.

  Neither the command nor an error prints control characters.
  """
  with text_table.printable_outputs():
    return _run(command, *args)


def _run(command: Callable[..., Any], *args: Any) -> int:
  try:
    return command(*args) or 0
  except KeyboardInterrupt:
    return _report("interrupted; rerun the same command to resume", 130)
  except (
    config_lib.ConfigError, config_lib.RunError, ImportError,
    NotImplementedError,
  ) as error:  # fmt: skip
    notes = errors.without_jax_notes(error)
    return _report("; ".join([str(error), *notes]), exits.of_error(error))
  except OSError as error:
    where = f"{error.filename}: " if error.filename else ""
    return _report(f"{where}{error.strerror or error}", exits.of_error(error))
  except (RuntimeError, AssertionError, MemoryError) as error:
    if exits.is_of_jax(error) or isinstance(error, MemoryError):
      reason = str(error).strip().partition("\n")[0]
      message = f"{type(error).__name__}: {reason}"
      if exits.is_of_options(error):
        message = f"config.train.compiler_options: {reason}"
      return _report(message, exits.of_error(error))
    if _has_devices():
      raise
    named = os.environ.get("JAX_PLATFORMS", "")
    reason = str(error).partition("\n")[0] or "there is none"
    message = f"got {named!r}, expected platforms of this machine, such as cpu"
    return _report(f"JAX_PLATFORMS: {message} ({reason})", 2)


def stop(message: str) -> NoReturn:
  """Ends the program with one line on stderr."""
  sys.exit(_report(message, 2))


class _Format(
  argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter
):
  """Keeps the line breaks of descriptions, and shows defaults."""

  def _get_help_string(self, action: argparse.Action) -> str | None:
    plain = action.default in (None, "", [], False)
    return action.help if plain else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
  """The flags of a command: with defaults in --help, and one-line errors."""

  def __init__(self, program: str, description: str | None):
    """For `program`, such as "python -m attnres_jax.data.prepare".

    `description` is the docstring of its module, with examples.
    """
    super().__init__(
      prog=program,
      description=description,
      formatter_class=_Format,
      allow_abbrev=False,
    )
    self._needs: dict[str, str | tuple[str, tuple[Any, ...]]] = {}
    self._kinds: dict[str, Any] = {}
    self._has_config = False

  def add_argument(
    self,
    *names: str,
    when: str | tuple[str, tuple[Any, ...]] | None = None,
    **options: Any,
  ) -> argparse.Action:
    """Adds one, which may only count together with another one.

    Args:
      *names: of argparse, as are `options`.
      when: name of the other argument, which has to be given, or name and
        values, one of which it has to have; else this argument is refused.
      **options: of argparse. Numbers have a `type` of `config.fields`, such as
        `Positive`, and are checked like the fields of a config.
    """
    kind = options.get("type")
    checked = kind in (int, float) or typing.get_origin(kind) is Annotated
    if typing.get_origin(kind) is Literal:
      options["type"] = str  # The dataclass of the field checks it.
    if checked:
      plain = fields_lib.plain(kind)
      options["type"] = fields_lib.integer if plain is int else plain
    action = super().add_argument(*names, **options)
    if checked:
      self._kinds[action.dest] = kind
    if when is not None:
      self._needs[action.dest] = when
    return action

  def add_config(self, default: str | None = None) -> None:
    """Adds the flags that name a config; --config is `default` if absent."""
    self._has_config = True
    group = self.add_argument_group("config")
    group.add_argument(
      "--config",
      default=default,
      metavar="FILE[:ARGUMENTS]",
      help="file with a get_config, or config.json of a run",
    )
    group.add_argument(
      _FIELD,
      dest="config_fields",
      metavar="VALUE",
      action="append",
      default=[],
      help="replaces a field, such as --config.optim.peak_lr=1e-3",
    )
    group.add_argument(
      "--help_config",
      nargs="?",
      const="",
      metavar="PART",
      help="lists all fields, or the fields of a part such as model.residual,"
      " with the values of --config if it is given",
    )

  def add_fields(self, cls: type, **defaults: Any) -> None:
    """Adds a flag for each field of a dataclass, with its docstring's words."""
    words = describe.meanings(cls)
    kinds = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
      default = defaults.get(field.name, field.default)
      self.add_argument(
        f"--{field.name}", type=kinds[field.name], default=default,
        help=words[field.name],
      )  # fmt: skip

  def add_plans(self) -> None:
    """Adds the flag that names the file of plans."""
    self.add_argument(
      "--plans", default=plans.FILE, help="for optim.accumulate_steps=0"
    )

  def parse_args(self, args=None, namespace=None) -> Any:
    """Parses as argparse; after `add_config`, `config` is a `config.Source` or
    None, and `given` the names of all arguments that are not defaults.
    """
    args = list(sys.argv[1:] if args is None else args)
    for arg in args:
      if not fields_lib.is_unicode(arg):
        name, _, value = arg.rpartition("=")
        stop(f"{name or 'argument'}: got {value!r}, expected text in UTF-8")
    if self._has_config:
      args = list(_with_fields(args))
    if any(arg.partition("=")[0] == "--help_config" for arg in args):
      for action in self._actions:
        action.required = False
    options = super().parse_args(args, namespace)
    for action in self._actions:
      if hasattr(options, action.dest) and action.type is not text:
        value = getattr(options, action.dest)
        setattr(options, action.dest, _expanded(value))
    self._check_numbers(options)
    given = {
      action.dest
      for action in self._actions
      for arg in args
      if arg.partition("=")[0] in action.option_strings
    }
    self._check_needs(options, given)
    if self._has_config:
      options.given = given
      fields = dict(word.partition("=")[::2] for word in options.config_fields)
      spec = options.config
      if spec is None and fields:
        stop("--config: missing, expected a file, with --config.FIELD=VALUE")
      options.config = None if spec is None else config_lib.Source(spec, fields)
      if options.help_config is not None:
        self.exit(run(_print_fields, options.help_config, options.config))
    return options

  def error(self, message: str) -> NoReturn:
    unknown = re.match(
      r"unrecognized arguments: --?(?:config\.)?(\w+)", message
    )
    if unknown and self._has_config:
      message += dotted.hint(unknown[1])
    stop(message)

  def _check_numbers(self, options: argparse.Namespace) -> None:
    for dest, kind in self._kinds.items():
      value = getattr(options, dest)
      if value is not None:
        try:
          setattr(options, dest, fields_lib.accept(f"--{dest}", value, kind))
        except config_lib.ConfigError as error:
          stop(str(error))

  def _check_needs(self, options: argparse.Namespace, given: set[str]) -> None:
    for dest in self._needs.keys() & given:
      when = self._needs[dest]
      if isinstance(when, str):
        if not getattr(options, when):
          stop(f"--{dest}: has no effect without --{when}")
      elif getattr(options, when[0]) not in when[1]:
        listed = " or ".join(map(str, when[1]))
        setting = f"{when[0]}={getattr(options, when[0])}"
        stop(f"--{dest}: has no effect with {setting}, only with {listed}")


def of_fields(cls: type[T], options: argparse.Namespace) -> T:
  """The dataclass whose flags `Parser.add_fields` has added."""
  names = [field.name for field in dataclasses.fields(cls)]  # pyrefly: ignore[bad-argument-type]
  return cls(**{name: getattr(options, name) for name in names})


def load_config(source: config_lib.Source | None) -> config_lib.RunConfig:
  """The config of a command that needs one.

  Raises:
    ConfigError: there is no --config, or a field cannot be used.
  """
  return needed(source).load()


def needed(source: config_lib.Source | None) -> config_lib.Source:
  """The value of --config.

  Raises:
    ConfigError: there is no such flag.
  """
  if source is None:
    raise config_lib.ConfigError(
      "--config: missing, expected a file such as configs/lm.py:size=tiny"
    )
  return source


_CLUSTER = (
  ("coordinator_address", str, "HOST:PORT", "of process 0"),
  ("num_processes", fields_lib.Size, "N", "of the run"),
  ("process_id", fields_lib.Count, "N", "index of this one, from 0"),
)


def add_cluster(parser: Parser) -> None:
  """Adds the flags of `connect`."""
  parser.add_argument(
    "--distributed", action="store_true", help="one of a run's processes"
  )
  for name, kind, metavar, words in _CLUSTER:
    parser.add_argument(
      f"--{name}", type=kind, when="distributed", metavar=metavar,
      help=f"{words}; automatic on a pod",
    )  # fmt: skip


def connect(options: argparse.Namespace) -> None:
  """Connects the processes of one run, if this is one of several.

  On a pod, JAX finds the others by itself; elsewhere all three arguments of
  `add_cluster` are needed.

  Raises:
    ConfigError: only some are given, or JAX finds no cluster.
    ConnectionError: the others cannot be reached, or have not come in time.
  """
  if not options.distributed:
    return
  fail = config_lib.fail_argument
  given = {name: getattr(options, name) for name, *_ in _CLUSTER}
  names = ", ".join(f"--{name}" for name in given)
  address, number, index = values = tuple(given.values())
  if None not in values:
    if not 0 <= index < number:
      fail("--process_id", index, f"0 to {number - 1}")
    if not re.fullmatch(r".+:\d{1,5}", address):
      fail("--coordinator_address", address, "host:port")
  elif values != (None, None, None):
    fail(names, values, "all three or, on a pod, none")
  import jax

  try:
    jax.distributed.initialize(**given)
  except ValueError as error:
    fail("--distributed", True, f"a cluster, or one named by {names} ({error})")
  except RuntimeError as error:
    # Such as a host that starts more than five minutes after the others.
    raise ConnectionError(f"--distributed: {error}") from error


def _with_fields(args: Sequence[str]) -> Iterator[str]:
  """Rewrites `--config.FIELD=VALUE` as one argument with its name."""
  for index, arg in enumerate(args):
    if arg == "--":
      yield from args[index:]
      return
    if arg.startswith("--config.") and "=" not in arg:
      stop(f"{arg}: got no value, expected {arg}=VALUE")
    yield re.sub(r"^--config\.", f"{_FIELD}=", arg)


def _print_fields(part: str, source: config_lib.Source | None) -> None:
  """The fields with their defaults, or with the values of a config."""
  config = config_lib.RunConfig() if source is None else source.load()
  print(describe.to_text(part, config))


def _expanded(value: Any) -> Any:
  if isinstance(value, list):
    return [_expanded(item) for item in value]
  is_home = isinstance(value, str) and value.startswith("~")
  return os.path.expanduser(value) if is_home else value


def _has_devices() -> bool:
  """Whether JAX finds what it is told to use."""
  import jax

  try:
    return bool(jax.devices())
  except (RuntimeError, AssertionError):
    return False


def _report(message: str, status: int) -> int:
  text = text_table.printable(" ".join(message.split()))
  print("error:", text, file=sys.stderr, flush=True)
  return status
