# SPDX-License-Identifier: Apache-2.0
"""The trained network of a command."""

import argparse
from typing import TYPE_CHECKING

from attnres_jax import config as config_lib
from attnres_jax import train
from attnres_jax.common import command_line
from attnres_jax.common import files
from attnres_jax.config import fields
from attnres_jax.inference import packaged

if TYPE_CHECKING:
  from attnres_jax import models


def add_flags(parser: command_line.Parser, several: bool = False) -> None:
  """Adds the flags of `load`; --workdir is a list where it may be repeated."""
  parser.add_argument(
    "--workdir", required=True, action="append" if several else "store",
    help=f"folder of a run, or a network of the package, {packaged.PREFIX}NAME",
  )  # fmt: skip
  parser.add_argument(
    "--step", type=fields.Count, help="checkpoint to use; the newest by default"
  )


def load(
  options: argparse.Namespace,
) -> "tuple[config_lib.RunConfig, models.Transformer, int]":
  """The run at --workdir, and the step of its checkpoint at --step.

  Raises:
    ConfigError: there is no such run, checkpoint or packaged network.
  """
  if options.workdir.startswith(packaged.PREFIX):
    name = options.workdir.removeprefix(packaged.PREFIX)
    config, model = packaged.load("--workdir", name)
    return config, model, config.train.steps
  folder = files.check_folder("--workdir", options.workdir, writable=False)
  steps = []
  if (folder / train.CHECKPOINTS).exists():
    # Orbax and JAX, which take seconds, once there is something to list.
    from attnres_jax.train import checkpoint

    steps = checkpoint.all_steps(folder)
  if not steps:
    config_lib.fail_argument(
      "--workdir", options.workdir, "the folder of a run with a checkpoint"
    )
  step = steps[-1] if options.step is None else options.step
  if step not in steps:
    choices = ", ".join(map(str, steps))
    config_lib.fail_argument("--step", step, f"one of {choices}")
  from attnres_jax.train import checkpoint

  return *checkpoint.load_model(folder, step), step
