# SPDX-License-Identifier: Apache-2.0
"""Trains students on random residual teachers and compares their losses.

  python -m experiments.teacher_student.run

Writes rows to `results.csv` beside this file when they are known, and fills the
README from them. Rerun the same command to resume.
"""

import argparse
from collections.abc import Sequence
import itertools
import sys
import time

import numpy as np
import tqdm

from attnres_jax.common import command_line
from attnres_jax.config import fields
from experiments.teacher_student import report
from experiments.teacher_student import toy

TEMPERATURES = (0.01, 0.1, 1.0, 10.0, 100.0)
RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
SIZES = toy.Sizes()

_KEY = "readout", "student", "seed", "temperature", "rate"


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
  more = {"seconds_of_all": f"{time.perf_counter() - start:.0f}"}
  return [
    dict(zip(_KEY, (readout, student, seed, *setting)))
    | {name: f"{loss_E[i]:.6g}" for name, loss_E in columns.items()}
    | more
    | sizes._asdict()
    for i, setting in enumerate(grid)
  ]


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser(
    "python -m experiments.teacher_student.run", __doc__
  )
  add = parser.add_argument
  add("--seeds", type=fields.Few, default=5, help="of every setting")
  add("--out", default="", help="another file of rows, not published")
  return command_line.run(_main, parser.parse_args(argv))


def _main(options: argparse.Namespace) -> None:
  fields.accept("--seeds", options.seeds, fields.Size)
  # Seed by seed, so that part of the runs is already a comparison. A group is
  # done with its last row.
  groups = [
    (readout, student, seed, TEMPERATURES[-1], RATES[-1])
    for seed in range(options.seeds)
    for readout in toy.READOUTS
    for student in toy.STUDENTS
  ]
  missing = report.PUBLISHED.missing(groups, _KEY, options.out)
  made = (rows(*x[:3], sizes=SIZES) for x in tqdm.tqdm(missing, unit="group"))
  report.PUBLISHED.measure(
    itertools.chain.from_iterable(made), _KEY, options.out
  )


if __name__ == "__main__":
  sys.exit(main())
