# SPDX-License-Identifier: Apache-2.0
"""Rows of results as CSV files: what experiments commit and reports read."""

from collections.abc import Iterable, Mapping, Sequence
import csv
import io
import os
from typing import Any

from etils import epath

from attnres_jax.common import files


def write(
  path: os.PathLike[str] | str, rows: Iterable[Mapping[str, Any]]
) -> None:
  """Writes the `text` of rows."""
  files.write(path, text(rows))


def text(rows: Iterable[Mapping[str, Any]]) -> str:
  """The columns of all rows; cells without a value are empty.

  A column that earlier rows lack keeps its place, such as an override that only
  some runs have: results come after it. Without rows the file is empty, and so
  nobody's.
  """
  rows = list(rows)
  columns: list[str] = []
  for row in rows:
    at = len(columns)
    for name in row:
      if name not in columns:
        columns.insert(at, name)
      at = columns.index(name) + 1
  written = io.StringIO()
  writer = csv.DictWriter(written, columns, lineterminator="\n")
  if columns:
    writer.writeheader()
  writer.writerows(rows)
  return written.getvalue()


def read(
  path: os.PathLike[str] | str, missing_ok: bool = False
) -> list[dict[str, str]]:
  """The rows of a file, with every cell as text; see `missing_ok` of unlink."""
  path = epath.Path(path)
  return [] if missing_ok and not path.exists() else parse(path.read_text())


def parse(content: str) -> list[dict[str, str]]:
  """The rows of a `text`."""
  return list(csv.DictReader(io.StringIO(content, newline="")))


def put(
  path: os.PathLike[str] | str, row: Mapping[str, Any], key: Sequence[str]
) -> None:
  """Adds a row to a file, or replaces the one with the same cells of `key`."""
  cells = lambda row: tuple(str(row.get(name, "")) for name in key)
  rows = {cells(old): old for old in read(path, missing_ok=True)}
  write(path, (rows | {cells(row): row}).values())
