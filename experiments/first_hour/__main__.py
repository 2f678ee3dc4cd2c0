# SPDX-License-Identifier: Apache-2.0
r"""The first minutes on hardware: operators checked and timed, steps, training.

  python -m experiments.first_hour --out=runs/first_hour --minutes=9
  python -m experiments.first_hour --platform=cpu

Rerun the same command to continue, also after a crash. On a CPU it runs in a
short form, which tries everything and says nothing about accelerators.
"""

import argparse
from collections.abc import Sequence
import os
import pathlib
import sys
import time

import jax

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import files
from attnres_jax.config import fields
from experiments.first_hour import measure

_JAX_PLATFORMS = {"gpu": "cuda,cpu", "tpu": "tpu,cpu", "cpu": "cpu"}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser("python -m experiments.first_hour", __doc__)
  add, every = parser.add_argument, ",".join(measure.PARTS)
  add("--out", default="runs/first_hour", help="folder of rows")
  add("--minutes", type=fields.Positive, default=9.0,
      help="time of the whole command")  # fmt: skip
  add("--platform", default="", choices=("", *_JAX_PLATFORMS),
      help="platform that JAX must use (default: any)")  # fmt: skip
  add("--parts", default=every, help="comma-separated; some of the default")
  return command_line.run(_main, parser.parse_args(argv))


def _main(options: argparse.Namespace) -> None:
  end = time.monotonic() + 60 * options.minutes
  parts = options.parts.split(",")
  for part in parts:
    config_lib.choose("--parts", part, dict.fromkeys(measure.PARTS))
  folder = pathlib.Path(files.check_folder("--out", options.out)).absolute()
  files.refuse_foreign("--out", folder, {"rows.csv": measure.SAME})
  folder.mkdir(parents=True, exist_ok=True)
  # PyTorch and JAX share the memory of a GPU.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  if options.platform:
    jax.config.update("jax_platforms", _JAX_PLATFORMS[options.platform])
  rows, left = measure.run(folder, parts, options.platform == "cpu", end)
  failed = sum(row["status"] == measure.FAILED for row in rows)
  if left:
    print(f"{left} tasks are left; rerun the same command to continue")
  print(f"{len(rows)} rows, {failed} failed: {folder / 'rows.csv'}")


if __name__ == "__main__":
  sys.exit(main())
