# SPDX-License-Identifier: Apache-2.0
"""Rows of the first hour: one number each, written as soon as it is known.

A file belongs to one device, commit and form. A rerun with the same three
continues it; rows of another device or commit are refused, because a verdict
over both would be about neither.
"""

from collections.abc import Iterable, Mapping
import pathlib
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax import csv_rows

Row = Mapping[str, Any]

# What became of a number: measured; an error, in `reason`; not available here,
# such as a kernel without this platform; not started, for lack of time.
OK, FAILED, NOT_HERE, SKIPPED = "ok", "failed", "not here", "skipped"
FIELDS = (
  "part", "task", "name", "case", "arm", "status", "measured", "unit", "low",
  "high", "limit", "to_limit", "above_limit", "estimate", "to_estimate",
  "off_estimate", "reason", "task_seconds",
)  # fmt: skip
# Facts that must be those of the rows which are there.
SAME = ("hardware", "commit", "jax", "form")


def make(
  name: str,
  case: str = "",
  arm: str = "",
  *,
  status: str = OK,
  measured: float | None = None,
  unit: str = "",
  spread: tuple[float, float] | None = None,
  limit: float | None = None,
  estimate: float | None = None,
  reason: str = "",
) -> dict[str, str]:
  """A row without part, task and facts.

  Args:
    name: of what is measured.
    case: its sizes.
    arm: its implementation or scheme.
    status: OK, FAILED, NOT_HERE or SKIPPED.
    measured: the number.
    unit: of all numbers, such as "us"; "" for ratios.
    spread: least and largest of several rounds.
    limit: the best that is possible, or what is tolerated.
    estimate: what was predicted.
    reason: why there is no number, or a remark.
  """
  row = dict.fromkeys(FIELDS, "")
  row |= dict(name=name, case=case, arm=arm, status=status, unit=unit)
  row["reason"] = " ".join(reason.split())
  if measured is None:
    return row
  row["measured"] = _text(measured)
  if spread is not None:
    row["low"], row["high"] = map(_text, spread)
  for word, of, apart in (
    ("limit", "to_limit", "above_limit"),
    ("estimate", "to_estimate", "off_estimate"),
  ):
    value = limit if word == "limit" else estimate
    if value is not None:
      row[word], row[apart] = _text(value), _text(measured - value)
      row[of] = f"{measured / value:.3f}" if value else ""
  return row


def number(row: Row, name: str) -> float | None:
  """A cell as a number; None if it is empty."""
  return float(row[name]) if row.get(name) else None


class Ledger:
  """The file of rows, and which tasks it has."""

  def __init__(self, path: pathlib.Path, facts: Mapping[str, str]):
    """Reads what is there.

    Raises:
      ConfigError: it has rows of another device, commit, version or form.
    """
    self.path, self._facts = path, dict(facts)
    self.rows: list[dict[str, str]] = []
    if path.exists():
      self.rows = csv_rows.read(path)
    for row in self.rows:
      for name in SAME:
        if row[name] != self._facts[name]:
          raise config_lib.ConfigError(
            f"{path}: has rows with {name} {row[name]!r}, and here it is"
            f" {self._facts[name]!r}; expected the same, or another folder"
            " with --out"
          )

  def done(self, task: str) -> bool:
    """Whether a task needs no (further) attempt."""
    states = {row["status"] for row in self.rows if row["task"] == task}
    return bool(states) and SKIPPED not in states

  def put(
    self, part: str, task: str, rows: Iterable[Row], seconds: float = 0.0
  ) -> None:
    """Replaces the rows of a task, and writes the file."""
    kept = [row for row in self.rows if row["task"] != task]
    common = dict(part=part, task=task, task_seconds=f"{seconds:.1f}")
    self.rows = kept + [{**row, **common, **self._facts} for row in rows]
    csv_rows.write(self.path, self.rows)


def _text(value: float) -> str:
  return f"{value:.5g}"
