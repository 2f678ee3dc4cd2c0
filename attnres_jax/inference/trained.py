# SPDX-License-Identifier: Apache-2.0
"""The trained network of a command, and the sizes of its engine."""

import argparse

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import command_line
from attnres_jax.common import files
from attnres_jax.config import fields
from attnres_jax.train import checkpoint


def add_flags(parser: command_line.Parser, *, length: str) -> None:
  """Adds the flags of a network and of its engine.

  Args:
    parser: of a command.
    length: what --length=0 stands for.
  """
  add = parser.add_argument
  add("--workdir", required=True, help="folder of a run")
  add("--step", type=int, help="checkpoint to use; the newest by default")
  add("--slots", type=int, default=8, help="texts at the same time")
  add(
    "--length", type=int, default=0,
    help=f"most tokens of a text with its prompt; {length}",
  )  # fmt: skip
  add(
    "--chunk", type=int, default=256,
    help="tokens of a prompt that are computed at once",
  )  # fmt: skip


def check_flags(options: argparse.Namespace) -> None:
  """Refuses sizes that no engine can have.

  Raises:
    ConfigError: names the flag.
  """
  for name in ("slots", "chunk"):
    fields.accept(f"--{name}", getattr(options, name), fields.Size)
  fields.accept("--length", options.length, fields.Count)


def find(options: argparse.Namespace) -> tuple[epath.Path, int]:
  """The folder at --workdir, and the step of its checkpoint at --step.

  Raises:
    ConfigError: there is no such run or checkpoint.
  """
  folder = files.check_folder("--workdir", options.workdir, writable=False)
  steps = checkpoint.all_steps(folder)
  if not steps:
    config_lib.fail_argument(
      "--workdir", options.workdir, "the folder of a run with a checkpoint"
    )
  if options.step is not None and options.step not in steps:
    known = ", ".join(map(str, steps))
    config_lib.fail_argument("--step", options.step, f"one of {known}")
  return folder, steps[-1] if options.step is None else options.step


def load(
  options: argparse.Namespace,
) -> tuple[config_lib.RunConfig, models.Transformer]:
  """The run at --workdir; see `find`."""
  folder, _ = find(options)
  return checkpoint.load_model(folder, options.step)
