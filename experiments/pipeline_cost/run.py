# SPDX-License-Identifier: Apache-2.0
"""What a pipeline sends, idles, holds and takes, beside what was planned.

  python -m experiments.pipeline_cost.run
  python -m experiments.pipeline_cost.run --only=bubbles,transfers --out=/tmp

Each part writes a file of its own beside this one (or in --out) when it is done
and can be run again by itself; the README says what the columns are. Everything
runs on eight virtual CPU devices. Programs of TPU slices are compiled and not
run, for which libtpu has to be installed. `experiments.pipeline_cost.tables`
then puts the files into the documents.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

from collections.abc import Callable, Iterator
import functools
import importlib.util
import pathlib
import sys
import time

from absl import app
from absl import flags
import jax

from attnres_jax import config as config_lib
from attnres_jax import csv_rows
from attnres_jax import environment
from experiments.pipeline_cost import plans
from experiments.pipeline_cost import step_time
from experiments.pipeline_cost import temporaries
from experiments.pipeline_cost import transfers

_FOLDER = pathlib.Path(__file__).parent
_ONLY = flags.DEFINE_list("only", None, "these parts; all of them by default")
_OUT = flags.DEFINE_string("out", str(_FOLDER), "folder that files go to")
_ROUNDS = flags.DEFINE_integer(
  "rounds", 15, "of timed steps, after one to warm up", lower_bound=1
)
_TPU = flags.DEFINE_bool(
  "tpu", None, "compile for TPU slices; by default where libtpu is installed"
)


def _parts(tpu: bool) -> dict[str, Callable[[], Iterator[plans.Row]]]:
  """By the name of the file."""
  return {
    "bubbles": plans.bubbles,
    "transitions": functools.partial(transfers.transitions, plans.FIG_3),
    "transfers": functools.partial(transfers.rows, tpu),
    "step_time": lambda: step_time.rows(_ROUNDS.value),
    "memory": temporaries.rows,
  }


# Parts that are nothing but programs of TPU slices.
_TPU_PARTS = ("memory",)


def run(name: str, rows: Iterator[plans.Row], folder: pathlib.Path) -> None:
  """Writes the file of a part; progress goes to stdout, a line per row."""
  start, facts = time.perf_counter(), environment.facts()
  found = []
  for row in rows:
    seconds = time.perf_counter() - start
    print(f"{name} {seconds:4.0f} s: {_line(row)}", flush=True)
    found.append(row | facts)
  csv_rows.write(folder / f"{name}.csv", found)


def _line(row: plans.Row) -> str:
  return ", ".join(f"{name} {value}" for name, value in row.items())


def main(argv):
  if argv[1:]:
    sys.exit(f"got {' '.join(argv[1:])}, expected flags only")
  folder = pathlib.Path(_OUT.value)
  if not folder.is_dir():
    sys.exit(f"--out: got {folder}, expected a folder that exists")
  installed = importlib.util.find_spec("libtpu") is not None
  tpu = installed if _TPU.value is None else _TPU.value
  if tpu and not installed:
    sys.exit("--tpu: libtpu is not installed; attnres-jax[tpu] brings it")
  parts = _parts(tpu)
  names = _ONLY.value or list(parts)
  try:
    for name in names:
      config_lib.choose("only", name, parts)
  except config_lib.ConfigError as error:
    sys.exit(str(error))
  jax.config.update("jax_num_cpu_devices", 8)
  # Steps are run one by one; devices must not wait for threads of a next one.
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  for name in names:
    if name in _TPU_PARTS and not tpu:
      print(f"{name}: left out, libtpu is not installed", flush=True)
      continue
    run(name, parts[name](), folder)


if __name__ == "__main__":
  app.run(main)
