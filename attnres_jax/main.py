# SPDX-License-Identifier: Apache-2.0
"""Trains a model from the command line.

  python -m attnres_jax.main \
    --config=configs/lm.py:size=tiny,residual=block_attnres \
    --config.optim.peak_lr=1e-3 --workdir=runs/tiny

The same command resumes an interrupted run. A bad flag, field or file stops it
before anything is compiled, with one line on stderr and exit status 2; a run
that cannot go on exits with 1.

On a pod, start the command on every host with `--distributed`; JAX finds the
cluster by itself. Elsewhere name it:

  python -m attnres_jax.main ... --distributed \
    --coordinator_address=10.0.0.1:1234 --num_processes=2 --process_id=0
"""

from collections.abc import Sequence
import os
import re
import sys
import traceback
from typing import NoReturn

from absl import app
from absl import flags
from absl import logging
import jax
import ml_collections
from ml_collections import config_flags

from attnres_jax import checkpoint
from attnres_jax import config as config_lib
from attnres_jax import step_log
from attnres_jax import train

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, with its argument after a colon.",
    lock_config=True,
)  # fmt: skip
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Folder of the run, local or gs://; made if needed."
)
_CHANGED = flags.DEFINE_bool(
    "resume_with_changed_config", False,
    "Go on with a run although its configuration or data differ.",
)  # fmt: skip
_DISTRIBUTED = flags.DEFINE_bool(
  "distributed", False, "One of several processes of one run."
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator_address", None, "host:port of process 0; found on a pod."
)
_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes", None, "How many processes; found on a pod."
)
_PROCESS_ID = flags.DEFINE_integer(
  "process_id", None, "Which one this is, from 0; found on a pod."
)


def main(argv: Sequence[str]) -> None:
  """Trains, once all flags make sense."""
  del argv
  try:
    config, workdir = _checked_flags()
  except config_lib.ConfigError as error:
    stop(str(error))

  if _DISTRIBUTED.value:
    jax.distributed.initialize(
      coordinator_address=_COORDINATOR.value,
      num_processes=_NUM_PROCESSES.value,
      process_id=_PROCESS_ID.value,
    )
  try:
    summary = train.train_and_evaluate(
      config, workdir, resume_with_changed_config=_CHANGED.value
    )
  except config_lib.ConfigError as error:
    stop(str(error))
  except (checkpoint.CheckpointError, step_log.NonFiniteError) as error:
    notes = getattr(error, "__notes__", [])
    stop("; ".join([str(error), *notes]), status=1)
  except jax.errors.JaxRuntimeError as error:
    if not _DISTRIBUTED.value:
      raise
    _leave(error)
  if summary["status"] == "stopped":
    saved = " with a checkpoint" if summary["step"] else ""
    print(
      f"stopped after step {summary['step']}{saved}; the same command goes on"
    )


def _leave(error: Exception) -> NoReturn:
  """Ends this process of several now, for the others to notice.

  An orderly exit would wait for them, and they may be what is gone.
  """
  traceback.print_exc()
  reason = str(error).strip().partition("\n")[0]
  print(
    f"error: process {jax.process_index()} ends, since a step failed here or"
    f" another process is gone ({reason}); the same command goes on from the"
    " last checkpoint",
    file=sys.stderr,
  )
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(1)


def parse_flags(argv: Sequence[str]) -> list[str]:
  """Absl's parsing, with one line for whatever is wrong."""
  try:
    _check_config_flags(argv[1:])
    rest = flags.FLAGS(list(argv))
  except Exception as error:
    stop(_explain(error))
  if len(rest) > 1:
    stop(f"unexpected argument {rest[1]!r}: options start with --")
  if flags.FLAGS["verbosity"].using_default_value:
    # The libraries' own reports would bury ours; --verbosity=0 brings them.
    flags.FLAGS.verbosity = logging.WARNING
  return rest


def stop(message: str, status: int = 2) -> NoReturn:
  """Ends the program with one line on stderr."""
  print(f"error: {message}", file=sys.stderr)
  sys.exit(status)


def config_of_flags() -> config_lib.RunConfig:
  """What --config and its fields say.

  Raises:
    ConfigError: there is no such flag, or a field cannot be used.
  """
  if _CONFIG.value is None:
    raise config_lib.ConfigError(
      "--config: missing, expected a file such as configs/lm.py:size=tiny"
    )
  return config_lib.build_run_config(_CONFIG.value)


def _checked_flags() -> tuple[config_lib.RunConfig, str]:
  """Configuration and folder, once all flags make sense together."""
  config = config_of_flags()
  if not _WORKDIR.value:
    raise config_lib.ConfigError("--workdir: missing, expected a folder")
  if "://" not in _WORKDIR.value and os.path.isfile(_WORKDIR.value):
    raise config_lib.ConfigError(
      f"--workdir: got {_WORKDIR.value!r}, a file, expected a folder"
    )
  named = (_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
  if _DISTRIBUTED.value and any(named) and None in named:
    raise config_lib.ConfigError(
      "--coordinator_address, --num_processes, --process_id: got"
      f" {named}, expected all three or, on a pod, none"
    )
  if not _DISTRIBUTED.value and named != (None, None, None):
    raise config_lib.ConfigError(
      "--coordinator_address, --num_processes, --process_id: given,"
      " expected together with --distributed"
    )
  return config, _WORKDIR.value


def _check_config_flags(args: Sequence[str]) -> None:
  """Names the first --config flag that cannot be used.

  Every config has the fields of the default one, so nothing is loaded here.

  Raises:
    ConfigError: no such file or field, or a value of another type.
  """
  fields = config_lib.default_config()
  for i, arg in enumerate(args):
    match = re.fullmatch(r"--?(no)?config((?:\.[^=]*)?)(?:=(.*))?", arg, re.S)
    if arg == "--":
      return
    if match is None:
      continue
    negated, path, value = match.groups()
    if value is None and not negated:
      value = args[i + 1] if i + 1 < len(args) else ""
    if path:
      _check_override(fields, path[1:], None if negated else value)
    elif not os.path.isfile(value.partition(":")[0]):
      file = value.partition(":")[0]
      raise config_lib.ConfigError(f"config file {file!r}: not found")


def _check_override(
  fields: ml_collections.ConfigDict, path: str, value: str | None
) -> None:
  node = fields
  names = path.split(".")
  for depth, name in enumerate(names):
    if not isinstance(node, ml_collections.ConfigDict):
      field = ".".join(names[:depth])
      config_lib.fail(path, value, f"no field under {field}, which is a value")
    config_lib.choose(".".join(names[: depth + 1]), name, dict(node))
    node = node[name]
  if isinstance(node, ml_collections.ConfigDict):
    config_lib.fail(path, value, "one of its fields: " + ", ".join(node))
  kind = type(node)
  if value is None and kind is not bool:
    config_lib.fail(path, "no", f"a value of type {kind.__name__}")
  if value is not None and not _parses(value, kind):
    # A bare --config.x.flag is followed by some other option.
    if kind is not bool or not value.startswith("-"):
      config_lib.fail(path, value, f"a value of type {kind.__name__}")


def _parses(value: str, kind: type) -> bool:
  parser = {
    bool: flags.BooleanParser,
    int: flags.IntegerParser,
    float: flags.FloatParser,
  }.get(kind, flags.ArgumentParser)()
  try:
    parser.parse(value)
  except (TypeError, ValueError):
    return False
  return True


def _explain(error: BaseException) -> str:
  """One line about an exception of flag parsing or of a config file."""
  chain = [error]
  while following := chain[-1].__cause__ or chain[-1].__context__:
    chain.append(following)
  for link in chain:
    # config_flags wraps an error in one of the same type, with a traceback.
    if isinstance(link, config_lib.ConfigError) and "\n" not in str(link):
      return str(link)
  if isinstance(error, flags.Error):
    return " ".join(str(error).split())
  root = chain[-1]
  text = " ".join(str(root).split())
  frames = traceback.extract_tb(root.__traceback__)
  where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
  return f"config file failed at {where}: {type(root).__name__}: {text}"


if __name__ == "__main__":
  app.run(main, flags_parser=parse_flags)
