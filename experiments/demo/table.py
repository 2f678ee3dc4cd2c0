# SPDX-License-Identifier: Apache-2.0
"""Writes the README's table from a committed demo run.

  python -m experiments.demo.table --adopt runs/demo/results.csv
  python -m experiments.demo.table

The first copies the results of a run to experiments/demo/results.csv, both put
what is in that file into the README. A test holds the two together.
"""

import argparse
from collections.abc import Sequence
import pathlib
import shutil

from attnres_jax import csv_rows
from experiments.demo import results
from experiments.pages import readme as readme_lib

RESULTS = pathlib.Path(__file__).with_name("results.csv")
README = pathlib.Path(__file__).parents[2] / "README.md"


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description="Writes the README's table.")
  parser.add_argument("--adopt", metavar="CSV", help="results to commit")
  options = parser.parse_args(argv)
  if options.adopt:
    shutil.copyfile(options.adopt, RESULTS)
  README.write_text(with_table(README.read_text(encoding="utf-8")))


def with_table(readme: str) -> str:
  """`readme` with the table of the committed results in its place.

  Raises:
    ValueError: the README has no place for it.
  """
  table = results.markdown(csv_rows.read(RESULTS))
  return readme_lib.fill(readme, "results", table)


if __name__ == "__main__":
  main()
