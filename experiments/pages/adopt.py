# SPDX-License-Identifier: Apache-2.0
"""Rows of a finished sweep, to be committed."""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax import csv_rows
from attnres_jax.sweep import monitor


def adopt(folder: str, path: pathlib.Path) -> None:
  """Writes the rows of a sweep as a CSV file.

  Raises:
    ConfigError: it is no sweep, or runs of it are not done.
  """
  progress = monitor.of_folder(folder)
  rows = monitor.rows(progress)
  if not rows or len(rows) < len(progress):
    raise config_lib.ConfigError(
      f"--adopt: got {folder!r}, where {len(rows)} of {len(progress)} runs are"
      " done; expected the folder of a finished sweep"
    )
  csv_rows.write(path, rows)


def origin(rows: Sequence[Mapping[str, Any]]) -> str:
  """One sentence on where committed rows come from."""
  seeds = sorted({int(row["seed"]) for row in rows})
  named = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
  hours = sum(float(row["seconds"]) for row in rows) / 3600
  all_of = lambda name: ", ".join(sorted({str(row[name]) for row in rows}))
  return (
    f"{len(rows)} runs, {named}, {hours:.1f} hours in all; text"
    f" {all_of('data')}; {all_of('hardware')}; Python {all_of('python')}, jax"
    f" {all_of('jax')}, commit {all_of('commit')}."
  )
