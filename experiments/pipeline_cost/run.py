# SPDX-License-Identifier: Apache-2.0
"""What a pipeline sends and holds and how long it idles, against the plan.

  python -m experiments.pipeline_cost.run
  python -m experiments.pipeline_cost.run --only=bubbles,transfers --out=/tmp

Each part writes its own file beside this one (or in --out) when it is done, and
can be run separately; the README explains the columns. Everything runs on eight
virtual CPU devices. Programs for TPU slices are compiled but not run, which
needs libtpu. `python -m experiments.publish pipeline_cost` then fills the
tables of the documents and draws the figure.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
from collections.abc import Callable, Iterator, Sequence
import functools
import importlib.util
import pathlib
import sys

import jax

from attnres_jax import command_line
from attnres_jax import config as config_lib
from experiments import measure
from experiments.pipeline_cost import plans
from experiments.pipeline_cost import programs
from experiments.pipeline_cost import tables
from experiments.pipeline_cost import transfers

PUBLISHED = tables.PUBLISHED
# Parts that only compile programs for TPU slices.
_TPU_PARTS = ("memory",)


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  return command_line.run(_run, _parser().parse_args(argv))


def _run(options: argparse.Namespace) -> None:
  if not options.out.is_dir():
    config_lib.fail_argument("--out", str(options.out), "a folder that exists")
  installed = importlib.util.find_spec("libtpu") is not None
  tpu = installed if options.tpu is None else options.tpu
  if tpu and not installed:
    raise config_lib.ConfigError(
      "--tpu: libtpu is not installed; attnres-jax[tpu] brings it"
    )
  # Indexed by the name of the file.
  parts: dict[str, Callable[[], Iterator[plans.Row]]] = {
    "bubbles": plans.bubbles,
    "transitions": functools.partial(transfers.transitions, plans.FIG_3),
    "transfers": functools.partial(transfers.rows, tpu),
    "step_time": functools.partial(programs.step_times, options.rounds),
    "memory": programs.temporaries,
  }
  names = options.only.split(",") if options.only else list(parts)
  for name in names:
    if name not in parts:
      config_lib.fail_argument("--only", name, f"one of {', '.join(parts)}")
  jax.config.update("jax_num_cpu_devices", 8)
  # Run steps one by one; devices must not wait for threads of the next step.
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  for name in names:
    if name in _TPU_PARTS and not tpu:
      print(f"{name}: left out, libtpu is not installed", flush=True)
      continue
    measure.record(options.out / f"{name}.csv", parts[name]())


def _parser() -> command_line.Parser:
  parser = command_line.Parser(
    "python -m experiments.pipeline_cost.run", __doc__
  )
  parser.add_argument(
    "--only", default="", help="comma-separated parts; all by default"
  )
  parser.add_argument(
    "--out",
    type=pathlib.Path,
    default=PUBLISHED.folder,
    help="folder to write the files to",
  )
  parser.add_argument(
    "--rounds",
    type=int,
    default=15,
    help="rounds of timed steps, after one warm-up",
  )
  parser.add_argument(
    "--tpu",
    action=argparse.BooleanOptionalAction,
    help="compile for TPU slices; by default if libtpu is installed",
  )
  return parser


if __name__ == "__main__":
  sys.exit(main())
