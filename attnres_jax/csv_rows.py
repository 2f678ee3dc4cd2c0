# SPDX-License-Identifier: Apache-2.0
"""Rows of results as CSV files: what experiments commit and reports read."""

from collections.abc import Iterable, Mapping
import csv
import io
import os
from typing import Any

from etils import epath

from attnres_jax import files


def write(
  path: os.PathLike[str] | str, rows: Iterable[Mapping[str, Any]]
) -> None:
  """Writes the columns of all rows; cells without a value are empty."""
  rows = list(rows)
  columns = list(dict.fromkeys(name for row in rows for name in row))
  text = io.StringIO()
  writer = csv.DictWriter(text, columns, lineterminator="\n")
  writer.writeheader()
  writer.writerows(rows)
  files.write(path, text.getvalue())


def read(path: os.PathLike[str] | str) -> list[dict[str, str]]:
  """The rows of a file, with every cell as text."""
  with epath.Path(path).open("r") as file:
    return list(csv.DictReader(file))
