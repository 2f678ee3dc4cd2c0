# SPDX-License-Identifier: Apache-2.0
r"""Fills in the README of an experiment and draws its figures, from its rows.

  python -m experiments.publish scaling_law --adopt=runs/scaling
  python -m experiments.publish scaling_law

The first command copies the rows of a finished sweep (its folder, or a file of
rows) to experiments/scaling_law/results.csv; --to selects another file, such as
--to=learning_rates, and --add keeps the rows of other runs of the same text.
"""

import argparse
from collections.abc import Sequence
import pathlib
import sys

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import csv_rows
from attnres_jax.sweep import monitor
from experiments.pages import readme


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser("python -m experiments.publish", __doc__)
  add = parser.add_argument
  add("experiment", help="name of its folder, such as scaling_law")
  add("--adopt", metavar="PATH", help="folder of a sweep, or a CSV file")
  add(
    "--add",
    action="store_true",
    when="adopt",
    help="keep committed rows of other runs of the same text",
  )
  add("--to", default="results", when="adopt", help="name of the file of rows")
  options = parser.parse_args(argv)
  return command_line.run(_main, options)


def _main(options: argparse.Namespace) -> None:
  published = readme.load(options.experiment)
  if not options.adopt:
    published.write()
    return
  files = dict.fromkeys(part.rows for part in published.parts)
  config_lib.choose("--to", options.to, files)
  committed, rows = published.read(options.to), _rows(options.adopt)
  if not rows:
    config_lib.fail_argument("--adopt", options.adopt, "a file with rows")
  lacking = ", ".join(
    name
    for name in (committed or [{}])[0]
    if name not in rows[0] and all(row[name] for row in committed)
  )
  if lacking:
    config_lib.fail_argument(
      "--adopt", options.adopt, f"rows with a column {lacking}"
    )
  if options.add:
    runs = {row.get("run") for row in rows}  # Others have no such column.
    texts = {row.get("data") for row in rows}
    rows = [
      *(r for r in committed if r["data"] in texts and r["run"] not in runs),
      *rows,
    ]
  try:
    published.write({options.to: csv_rows.parse(csv_rows.text(rows))})
  except (KeyError, ValueError) as error:
    # Such as rows of another experiment. A ConfigError is a ValueError.
    reason = f"{type(error).__name__}: {error}"
    config_lib.fail_argument(
      "--adopt", options.adopt, f"rows that can be published ({reason})"
    )


def _rows(path: str) -> readme.Rows:
  """Rows of a file, or of a finished sweep."""
  if pathlib.Path(path).is_file():
    return csv_rows.read(path)
  progress = monitor.of_folder(path)
  rows = monitor.rows(progress)
  if not rows or len(rows) < len(progress):
    raise config_lib.ConfigError(
      f"--adopt: got {path!r}, where {len(rows)} of {len(progress)} runs are"
      " done; expected the folder of a finished sweep"
    )
  return rows


if __name__ == "__main__":
  sys.exit(main())
