# SPDX-License-Identifier: Apache-2.0
"""Rows of results as CSV files: what experiments commit and reports read."""

from collections.abc import Iterable, Mapping
import csv
import os
from typing import Any

from etils import epath


def write(
  path: os.PathLike[str] | str, rows: Iterable[Mapping[str, Any]]
) -> None:
  """A file with the columns of all rows; a cell without a value is empty."""
  rows = list(rows)
  columns = list(dict.fromkeys(name for row in rows for name in row))
  with epath.Path(path).open("w") as file:
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def read(path: os.PathLike[str] | str) -> list[dict[str, str]]:
  """The rows of a file, every cell as it is written."""
  with epath.Path(path).open("r") as file:
    return list(csv.DictReader(file))
