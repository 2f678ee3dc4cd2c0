# SPDX-License-Identifier: Apache-2.0
r"""The first hour on hardware: what was estimated, measured on the device here.

  python -m experiments.first_hour --out=runs/first_hour --minutes=60
  python -m experiments.first_hour --platform=cpu

In this order: the rates of the device, every operator against its reference,
training steps over PreNorm, a planned network with a trace, operators at the
shapes of the compiled tables. Rerun the same command to continue. On a CPU it
runs in a short form, which tries everything and says nothing about
accelerators.
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

# The compiled tables that the hour tests.
PUBLISHED = readme.Published(
  pathlib.Path(__file__).parent,
  [
    readme.Place(make, name, "", f"../../{tables.DOCUMENT}")
    for name, make in tables.PLACES.items()
  ]
  + [readme.Place(tables.of_hour, name, name) for name in ("h100", "h200")],
)
# A task that writes no row for so long is taken to hang.
_TASK_SECONDS = 900.0
_ATTEMPTS = 20


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  return command_line.run(_main, make_parser().parse_args(argv))


def make_parser() -> command_line.Parser:
  """Of the command's arguments."""
  parser = command_line.Parser("python -m experiments.first_hour", __doc__)
  add = parser.add_argument
  add("--out", default="runs/first_hour", help="folder of rows")
  add(
    "--minutes",
    type=fields.Positive,
    default=60.0,
    help="maximum time of the whole command",
  )
  add(
    "--platform", default="", choices=("", "cpu", "tpu", "gpu"),
    help="platform that JAX must use (default: the one it finds)",
  )  # fmt: skip
  add(
    "--parts", default=",".join(measure.PARTS),
    help="comma-separated; some of the default",
  )  # fmt: skip
  add("--device_process", action="store_true", help="measure in this process")
  return parser


def _main(options: argparse.Namespace) -> None:
  if not options.minutes > 0:
    config_lib.fail_argument("--minutes", options.minutes, "more than 0")
  parts = options.parts.split(",")
  for part in parts:
    config_lib.choose("--parts", part, dict.fromkeys(measure.PARTS))
  folder = pathlib.Path(files.check_folder("--out", options.out)).absolute()
  ours = {"rows.csv": measure.SAME}
  files.refuse_foreign("--out", folder, ours)
  folder.mkdir(parents=True, exist_ok=True)
  if options.device_process:
    measure.run(folder, parts, options.platform == "cpu")
    return
  _hour(folder, options, time.monotonic() + 60 * options.minutes)


def _hour(
  folder: pathlib.Path, options: argparse.Namespace, end: float
) -> None:
  """Keeps a process on the device until all is measured, or time is over.

  A process that crashes or hangs is replaced; the task that it was at has
  failed. This process never touches the device.
  """
  path, shown = folder / "rows.csv", 0
  names = {"gpu": "cuda,cpu", "tpu": "tpu,cpu"}
  environment = dict(os.environ)
  # PyTorch and JAX share the memory of a GPU.
  environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  if options.platform:
    environment["JAX_PLATFORMS"] = names.get(options.platform, options.platform)
  command = [
    sys.executable, "-m", "experiments.first_hour", "--device_process",
    f"--out={folder}", f"--parts={options.parts}",
    f"--platform={options.platform}",
  ]  # fmt: skip
  for _ in range(_ATTEMPTS):
    process = subprocess.Popen(command, env=environment)
    changed = time.monotonic()
    try:
      while process.poll() is None and time.monotonic() < end:
        time.sleep(0.5)
        rows = csv_rows.read(path) if path.exists() else []
        ready = [row for row in rows if row["status"] != measure.BEGUN]
        if len(ready) != shown:
          changed = time.monotonic()
          for row in ready[shown:]:
            _tell(row, end - changed)
          shown = len(ready)
        if time.monotonic() - changed > _TASK_SECONDS:
          break
    finally:
      if process.poll() is None:
        process.kill()
      process.wait()
    if process.returncode in (0, 2) or time.monotonic() >= end:
      break
  if process.returncode == 2:
    raise config_lib.ConfigError("the process of the device refused to begin")
  rows = csv_rows.read(path) if path.exists() else []
  if time.monotonic() >= end and path.exists():
    # The task in progress has not failed; the next command begins it again.
    rows = [row for row in rows if row["status"] != measure.BEGUN]
    csv_rows.write(path, rows)
  failed = sum(row["status"] == measure.FAILED for row in rows)
  if process.returncode:
    print("stopped before the last task; rerun the same command to continue")
  print(f"{len(rows)} rows, {failed} failed: {path}")


def _tell(row: measure.Row, left: float) -> None:
  number = f"{row['measured']} {row['unit']}" if row["measured"] else ""
  words = f"{row['task']}: {row['arm']} {number} {row['status']}"
  print(f"{left:6.0f} s left: {words} {row['reason']}", flush=True)


if __name__ == "__main__":
  sys.exit(main())
