# SPDX-License-Identifier: Apache-2.0
"""What all commands share: the --config flags, and one line for every error.

`run` calls a command and returns its exit status: 2 for invalid input, 1 for a
run that failed, 130 for an interrupt. Instead of a traceback, one line on
stderr says what was wrong. `Parser` does the same for the arguments of commands
that do not take a --config.
"""

import argparse
from collections.abc import Callable, Sequence
import re
import sys
from typing import Any, NoReturn

from absl import flags
from absl import logging
import jax

from attnres_jax import config as config_lib
from attnres_jax import plans

_CONFIG = flags.DEFINE_string(
  "config", None, "Config file, with its argument after a colon."
)
_FIELDS = flags.DEFINE_multi_string(
  "config_field", [], "FIELD=VALUE, the same as --config.FIELD=VALUE."
)
_PLANS = flags.DEFINE_string(
  "plans", plans.FILE, "File of plans, for optim.accumulate_steps=0."
)


def run(command: Callable[..., Any], *args: Any) -> int:
  """Calls a command; returns its exit status, 0 for None."""
  try:
    return command(*args) or 0
  except KeyboardInterrupt:
    return _report("interrupted; rerun the same command to resume", 130)
  except (config_lib.ConfigError, ImportError, NotImplementedError) as error:
    return _report(str(error), 2)
  except config_lib.RunError as error:
    notes = getattr(error, "__notes__", [])
    return _report("; ".join([str(error), *notes]), 1)
  except OSError as error:
    where = f"{error.filename}: " if error.filename else ""
    return _report(f"{where}{error.strerror or error}", 1)
  except (jax.errors.JaxRuntimeError, MemoryError) as error:
    reason = str(error).strip().partition("\n")[0]
    return _report(f"{type(error).__name__}: {reason}", 1)


def stop(message: str, status: int = 2) -> NoReturn:
  """Ends the program with one line on stderr."""
  sys.exit(_report(message, status))


class Parser(argparse.ArgumentParser):
  """A parser with defaults in --help and one-line errors."""

  def __init__(self, program: str, description: str | None):
    """For `program`, such as "python -m attnres_jax.data.prepare"."""
    super().__init__(
      prog=program,
      description=(description or "").partition("\n")[0],
      formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

  def error(self, message: str) -> NoReturn:
    stop(message)


def parse_flags(argv: Sequence[str]) -> list[str]:
  """Absl's parsing, with one-line errors."""
  try:
    rest = flags.FLAGS(with_fields(argv))
  except (flags.Error, ValueError, OSError) as error:
    stop(str(error))
  if len(rest) > 1:
    stop(f"unexpected argument {rest[1]!r}: options start with --")
  if flags.FLAGS["verbosity"].using_default_value:
    # The libraries' own reports would bury ours; --verbosity=0 shows them.
    flags.FLAGS.verbosity = logging.WARNING
  return rest


def config_of_flags() -> config_lib.RunConfig:
  """The configuration that --config and its fields describe.

  Raises:
    ConfigError: there is no such flag, or a field cannot be used.
  """
  return config_lib.Source(config_spec(), fields_of(_FIELDS.value)).load()


def fields_of(given: Sequence[str]) -> dict[str, str]:
  """Dotted field names to values as text, of FIELD=VALUE arguments."""
  return {name: text for name, _, text in (x.partition("=") for x in given)}


def config_spec() -> str:
  """The value of --config.

  Raises:
    ConfigError: there is no such flag.
  """
  if _CONFIG.value is None:
    raise config_lib.ConfigError(
      "--config: missing, expected a file such as configs/lm.py:size=tiny"
    )
  return _CONFIG.value


def plans_file() -> str:
  """The value of --plans."""
  return _PLANS.value


def connect(
  distributed: bool,
  coordinator_address: str | None,
  num_processes: int | None,
  process_id: int | None,
) -> None:
  """Connects the processes of one run, if this is one of several.

  On a pod, JAX finds the others by itself; elsewhere all three arguments are
  needed.

  Raises:
    ConfigError: only some are given, or JAX finds no cluster.
  """
  fail = config_lib.fail_argument
  names = "--coordinator_address, --num_processes, --process_id"
  given = dict(
    coordinator_address=coordinator_address,
    num_processes=num_processes,
    process_id=process_id,
  )
  values = tuple(given.values())
  if not distributed:
    if values != (None, None, None):
      fail(names, values, "them together with --distributed")
    return
  if coordinator_address is None or num_processes is None or process_id is None:
    if values != (None, None, None):
      fail(names, values, "all three or, on a pod, none")
  else:
    if not 0 <= process_id < num_processes:
      fail("--process_id", process_id, f"0 to {num_processes - 1}")
    if not re.fullmatch(r".+:\d{1,5}", coordinator_address):
      fail("--coordinator_address", coordinator_address, "host:port")
  try:
    jax.distributed.initialize(**given)
  except (ValueError, RuntimeError, OSError) as error:
    fail("--distributed", True, f"a cluster, or one named by {names} ({error})")


def with_fields(argv: Sequence[str]) -> list[str]:
  """Rewrites all forms of `--config.FIELD` as `--config_field`."""
  defaults = config_lib.flatten(config_lib.default_config().to_dict())
  written, args = [], iter(argv)
  for arg in args:
    if arg == "--":
      return [*written, arg, *args]
    match = re.fullmatch(r"--?(no)?config\.([^=]*)(?:=(.*))?", arg, re.S)
    if match is None:
      written.append(arg)
      continue
    negated, field, value = match.groups()
    kind = type(defaults.get(field, True))
    if negated and (kind is not bool or value is not None):
      config_lib.fail(field, "no", f"a value of type {kind.__name__}")
    if negated:
      value = "false"
    elif value is None:
      value = "true" if kind is bool else next(args, "")
    written.append(f"--config_field={field}={value}")
  return written


def _report(message: str, status: int) -> int:
  print("error:", " ".join(message.split()), file=sys.stderr, flush=True)
  return status
