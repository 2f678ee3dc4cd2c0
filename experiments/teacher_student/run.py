# SPDX-License-Identifier: Apache-2.0
"""Trains students on random residual teachers and compares their losses.

  python -m experiments.teacher_student.run

Writes rows to `results.csv` beside this file when they are known, and fills the
README from them. Rerun the same command to resume.
"""

import argparse
from collections.abc import Sequence
import itertools
import pathlib
import sys
import time

import numpy as np
import tqdm

from attnres_jax.common import command_line
from attnres_jax.common import csv_rows
from attnres_jax.common import environment
from attnres_jax.common import files
from attnres_jax.config import fields
from experiments.teacher_student import report
from experiments.teacher_student import toy

TEMPERATURES = (0.01, 0.1, 1.0, 10.0, 100.0)
RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
SIZES = toy.Sizes()

_RESULTS = pathlib.Path(__file__).absolute().with_name("results.csv")


def rows(
  readout: str, student: str, seed: int, sizes: toy.Sizes
) -> list[dict[str, object]]:
  """A row for every temperature and rate."""
  grid = list(itertools.product(TEMPERATURES, RATES))
  temperature_E, rate_E = np.array(grid, np.float32).T
  seed_E = np.full(len(grid), seed)
  start = time.perf_counter()
  losses = toy.train(student, readout, temperature_E, rate_E, seed_E, sizes)
  columns = {name: np.asarray(loss_E) for name, loss_E in losses.items()}
  seconds = f"{time.perf_counter() - start:.0f}"
  return [
    {
      "readout": readout,
      "student": student,
      "seed": seed,
      "temperature": temperature,
      "rate": rate,
    }
    | {name: f"{loss_E[i]:.6g}" for name, loss_E in columns.items()}
    | {"seconds_of_all": seconds}
    | sizes._asdict()
    for i, (temperature, rate) in enumerate(grid)
  ]


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser(
    "python -m experiments.teacher_student.run", __doc__
  )
  parser.add_argument(
    "--seeds", type=fields.Few, default=5, help="of every setting"
  )
  parser.add_argument(
    "--out",
    default=str(_RESULTS),
    help="file of rows; others are not published",
  )
  return command_line.run(_main, parser.parse_args(argv))


def _main(options: argparse.Namespace) -> None:
  fields.accept("--seeds", options.seeds, fields.Size)
  out = pathlib.Path(options.out)
  files.check_output("--out", out, ("readout", "student", "seed"))
  table = csv_rows.read(out, missing_ok=True)
  done = {(row["readout"], row["student"], int(row["seed"])) for row in table}
  # Seed by seed, so that part of the runs is already a comparison.
  groups = [
    (readout, student, seed)
    for seed in range(options.seeds)
    for readout in toy.READOUTS
    for student in toy.STUDENTS
  ]
  origin = environment.facts()
  for group in tqdm.tqdm([w for w in groups if w not in done], unit="group"):
    table += [row | origin for row in rows(*group, SIZES)]
    csv_rows.write(out, table)
  if out == _RESULTS:
    report.PUBLISHED.write()


if __name__ == "__main__":
  sys.exit(main())
