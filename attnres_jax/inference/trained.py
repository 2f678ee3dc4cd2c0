# SPDX-License-Identifier: Apache-2.0
"""The trained network of a command."""

import argparse
from typing import TYPE_CHECKING

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax import train
from attnres_jax.common import command_line
from attnres_jax.common import files
from attnres_jax.config import fields
from attnres_jax.inference import packaged

if TYPE_CHECKING:
  from attnres_jax import models


def add_flags(parser: command_line.Parser, several: bool = False) -> None:
  """Adds the flags of `find`; --workdir is a list where it may be repeated."""
  parser.add_argument(
    "--workdir", required=True, action="append" if several else "store",
    help=f"folder of a run, or a network of the package, {packaged.PREFIX}NAME",
  )  # fmt: skip
  parser.add_argument(
    "--step", type=fields.Count, help="checkpoint to use; the newest by default"
  )


def find(options: argparse.Namespace) -> tuple[epath.Path, int]:
  """The folder at --workdir, and the step of its checkpoint at --step.

  Raises:
    ConfigError: there is no such run or checkpoint.
  """
  workdir = packaged.folder_of(options.workdir)
  folder = files.check_folder("--workdir", workdir, writable=False)
  steps = []
  if (folder / train.CHECKPOINTS).exists():
    # Orbax and JAX, which take seconds, once there is something to list.
    from attnres_jax.train import checkpoint

    steps = checkpoint.all_steps(folder)
  if not steps:
    config_lib.fail_argument(
      "--workdir", options.workdir, "the folder of a run with a checkpoint"
    )
  if options.step is not None and options.step not in steps:
    choices = ", ".join(map(str, steps))
    config_lib.fail_argument("--step", options.step, f"one of {choices}")
  return folder, steps[-1] if options.step is None else options.step


def load(
  options: argparse.Namespace,
) -> "tuple[config_lib.RunConfig, models.Transformer]":
  """The run at --workdir; see `find`."""
  folder, _ = find(options)
  from attnres_jax.train import checkpoint

  return checkpoint.load_model(folder, options.step)
