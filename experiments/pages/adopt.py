# SPDX-License-Identifier: Apache-2.0
"""Rows of a finished sweep, to be committed."""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax.sweep import monitor
from attnres_jax.sweep import rows as rows_lib
from experiments.pages import environment

# The same in all rows: of the machine and the checkout that adopt them, which
# are to be those that trained.
COLUMNS = ("hardware", "commit")


def adopt(folder: str, path: pathlib.Path) -> None:
  """Writes the rows of a sweep, with where they come from, as a CSV file.

  Raises:
    ConfigError: it is no sweep, or runs of it are not done.
  """
  progress = monitor.of_folder(folder)
  rows = rows_lib.of_folder(folder) if progress else []
  if not rows or len(rows) < len(progress):
    raise config_lib.ConfigError(
      f"--adopt: got {folder!r}, where {len(rows)} of {len(progress)} runs are"
      " done; expected the folder of a finished sweep"
    )
  facts = environment.facts()
  common = {name: facts[name] for name in COLUMNS}
  rows_lib.write(path, [row | common for row in rows])


def origin(rows: Sequence[Mapping[str, Any]]) -> str:
  """One sentence on where committed rows come from."""
  first = rows[0]
  seeds = sorted({int(row["seed"]) for row in rows})
  named = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
  hours = sum(float(row["seconds"]) for row in rows) / 3600
  return (
    f"{len(rows)} runs, {named}, {hours:.1f} hours in all; text"
    f" {first['data']}; {first['hardware']}; Python {first['python']}, jax"
    f" {first['jax']}, commit {first['commit']}."
  )
