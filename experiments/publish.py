# SPDX-License-Identifier: Apache-2.0
r"""Fills in the README of an experiment and draws its figures, from its rows.

  python -m experiments.publish scaling_law --adopt=runs/scaling
  python -m experiments.publish scaling_law

The first command copies the rows of a finished sweep (its folder, or a file of
rows) to experiments/scaling_law/results.csv; --to selects another file, such as
--to=learning_rates, and --add keeps the rows of other runs of the same text.
`PUBLISHED` in the run.py or report.py of the experiment says how the rows are
used. A test keeps documents and rows consistent.
"""
# The room exceeds its budget of 4,850 lines by three more questions: what each
# of all schemes costs and learns (residual_zoo), what depth attention gains
# with each scheme at its own rate (laptop_gain), upcycling.

import argparse
from collections.abc import Sequence
import importlib
import io
import pathlib
import sys

import matplotlib

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import csv_rows
from attnres_jax.common import files
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


def load(experiment: str) -> readme.Published:
  """The tables and figures that an experiment publishes.

  Raises:
    ConfigError: it publishes nothing.
  """
  # In the report, where the command does without figures until it has run.
  for name in ("run", "report") if experiment.isidentifier() else ():
    name = f"experiments.{experiment}.{name}"
    try:
      return importlib.import_module(name).PUBLISHED
    except AttributeError:
      pass
    except ModuleNotFoundError as error:
      if not name.startswith(error.name or "?"):
        raise
  raise config_lib.ConfigError(
    f"experiment: got {experiment!r}, expected a folder of experiments/ whose"
    " run.py or report.py has PUBLISHED"
  )


def publish(published: readme.Published) -> None:
  """Fills in the documents and draws the figures.

  Nothing is written before all of them are made. `published.adopted` are rows
  that become a file as well.
  """
  rows = [published.read(name) for name in published.figure_rows]
  written: dict[pathlib.Path, str | bytes] = {}
  for name, draw in published.figures.items() if all(rows) else ():
    # The same rows give the same file.
    salt = {"svg.hashsalt": pathlib.Path(name).stem, "svg.fonttype": "none"}
    with matplotlib.rc_context(salt), io.BytesIO() as drawn:
      draw(*rows).savefig(
        drawn, format="svg", facecolor="white", metadata={"Date": None}
      )
      written[published.folder / name] = drawn.getvalue()
  written |= published.filled()
  for name, adopted in published.adopted.items():
    csv_rows.write(published.folder / f"{name}.csv", adopted)
  for path, content in written.items():
    files.write(path, content)


def _main(options: argparse.Namespace) -> None:
  published = load(options.experiment)
  if options.adopt:
    places = {place.rows: place for place in published.places}
    config_lib.choose("--to", options.to, places)
    adopted = _adopted(options.adopt)
    _check_columns(options.adopt, adopted, published.read(options.to))
    names = {row.get("run") for row in adopted}  # Others have no such column.
    texts = {row.get("data") for row in adopted}
    rows_before = published.read(options.to) if options.add else []
    rows_before = [row for row in rows_before if row.get("data") in texts]
    others = [row for row in rows_before if row["run"] not in names]
    rows = csv_rows.parse(csv_rows.text([*others, *adopted]))
    published = published._replace(adopted={options.to: rows})
    try:
      publish(published)
    except (KeyError, ValueError) as error:
      # Such as rows of another experiment. A ConfigError is a ValueError.
      reason = f"{type(error).__name__}: {error}"
      config_lib.fail_argument(
        "--adopt", options.adopt, f"rows that can be published ({reason})"
      )
    return
  publish(published)


def _check_columns(
  path: str, adopted: readme.Rows, committed: readme.Rows
) -> None:
  """Refuses rows that are none, or lack columns of all committed rows."""
  if not adopted:
    config_lib.fail_argument("--adopt", path, "a file with rows")
  needed = {
    name
    for name in (committed[0] if committed else ())
    if all(row[name] for row in committed)
  }
  missing = sorted(needed.difference(*adopted[:1]))
  if missing:
    config_lib.fail_argument(
      "--adopt", path, f"rows with a column {', '.join(missing)}"
    )


def _adopted(path: str) -> readme.Rows:
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
