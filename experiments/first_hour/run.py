# SPDX-License-Identifier: Apache-2.0
r"""The first minutes on hardware: operators checked and timed, steps, training.

  python -m experiments.first_hour --out=runs/first_hour --minutes=9
  python -m experiments.first_hour --platform=cpu

Rerun the same command to continue. On a CPU it runs in a short form, which
tries everything and says nothing about accelerators.
"""

import argparse
from collections.abc import Sequence
import os
import pathlib
import subprocess
import sys
import time

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import csv_rows
from attnres_jax.common import files
from attnres_jax.config import fields
from experiments.first_hour import measure
from experiments.first_hour import tables
from experiments.pages import readme

PUBLISHED = readme.Published(pathlib.Path(__file__).parent, tables.PLACES)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser("python -m experiments.first_hour", __doc__)
  add = parser.add_argument
  every = ",".join(measure.PARTS)
  add("--out", default="runs/first_hour", help="folder of rows")
  add(
    "--minutes",
    type=fields.Positive,
    default=9.0,
    help="time of the whole command",
  )
  add("--platform", default="", choices=("", "cpu", "tpu", "gpu"),
      help="platform that JAX must use (default: any)")  # fmt: skip
  add("--parts", default=every, help="comma-separated; some of the default")
  add("--device_process", action="store_true", help="measure in this process")
  return command_line.run(_main, parser.parse_args(argv))


def _main(options: argparse.Namespace) -> None:
  end = time.monotonic() + 60 * options.minutes
  if not options.minutes > 0:
    config_lib.fail_argument("--minutes", options.minutes, "more than 0")
  parts = options.parts.split(",")
  for part in parts:
    config_lib.choose("--parts", part, dict.fromkeys(measure.PARTS))
  folder = pathlib.Path(files.check_folder("--out", options.out)).absolute()
  files.refuse_foreign("--out", folder, {"rows.csv": measure.SAME})
  folder.mkdir(parents=True, exist_ok=True)
  if options.device_process:
    measure.run(folder, parts, options.platform == "cpu")
  else:
    supervise(folder, options, end)


def supervise(
  folder: pathlib.Path, options: argparse.Namespace, end: float
) -> None:
  """Replaces a process that crashes or hangs, whose task has then failed."""
  path = folder / "rows.csv"
  # PyTorch and JAX share the memory of a GPU.
  environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
  if options.platform:
    names = {"gpu": "cuda,cpu", "tpu": "tpu,cpu"}
    environment["JAX_PLATFORMS"] = names.get(options.platform, options.platform)
  command = [
    sys.executable, "-m", "experiments.first_hour", "--device_process",
    f"--out={folder}", f"--parts={options.parts}",
    f"--platform={options.platform}",
  ]  # fmt: skip
  read = lambda: csv_rows.read(path) if path.exists() else []
  status, before = None, None
  while status not in (0, 2) and time.monotonic() < end and read() != before:
    before = read()
    try:
      left = end - time.monotonic()
      status = subprocess.run(command, env=environment, timeout=left).returncode
    except subprocess.TimeoutExpired:
      status = None
  if status == 2:
    raise config_lib.ConfigError("the process of the device refused to begin")
  rows = read()
  if time.monotonic() >= end and rows:
    # The task in progress has not failed; the next command begins it again.
    unfinished = {r["task"] for r in rows if r["status"] == measure.BEGUN}
    rows = [row for row in rows if row["task"] not in unfinished]
    csv_rows.write(path, rows)
  failed = sum(row["status"] == measure.FAILED for row in rows)
  if status != 0:
    print("stopped before the last task; rerun the same command to continue")
  print(f"{len(rows)} rows, {failed} failed: {path}")


if __name__ == "__main__":
  sys.exit(main())
