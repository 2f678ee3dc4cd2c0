# SPDX-License-Identifier: Apache-2.0
"""Plain-text tables for the output of commands."""

from collections.abc import Sequence
from typing import Any


def printable(text: str) -> str:
  """A text without control characters, which could steer a terminal."""
  return "".join(
    c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text
  )


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
  """Columns as wide as necessary, with numbers aligned right."""
  lines = [list(header)]
  for row in rows:
    lines.append(
      [f"{c:,}" if isinstance(c, int) else printable(str(c)) for c in row]
    )
  widths = [max(map(len, column)) for column in zip(*lines)]
  return "\n".join(
    "  ".join(
      cell.ljust(width) if i == 0 else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(line, widths))
    ).rstrip()
    for line in lines
  )


def columns(rows: Sequence[Sequence[str]], *, rule: bool = False) -> str:
  """Columns of words, each to the left; `rule` underlines the first row."""
  widths = [max(map(len, column)) for column in zip(*rows)]
  lines = [
    "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
    for row in rows
  ]
  if rule:
    lines.insert(1, "  ".join("-" * width for width in widths))
  return "\n".join(lines) + "\n"
