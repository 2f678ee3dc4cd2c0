# SPDX-License-Identifier: Apache-2.0
"""Rows of a run as lines for people."""

from collections.abc import Mapping
import datetime
import time
from typing import Any

from attnres_jax.common import text_table

Row = Mapping[str, Any]

# The columns of a train row that the console shows; the file has all.
_CONSOLE_TRAIN = (
    "loss", "grad_norm", "learning_rate", "tokens_per_second",
    "tokens_per_second_per_device", "model_flop_utilisation", "goodput",
    "step_seconds", "moe_max_violation",
)  # fmt: skip
# Of these events, too: where and with which versions is for the file.
_CONSOLE_EVENTS = {
  "start": None,
  "resume": ("lost_steps", "lost_seconds"),
  "compiled": ("function", "seconds"),
  "ready": None,
}


class Console:
  """Lines: every few seconds one of training, and all others."""

  def __init__(self, steps: int, *, file=None, seconds: float = 5.0):
    self._file = file
    self._steps = steps
    self._seconds = seconds
    self._next_line = 0.0

  def write(self, row: Row) -> None:
    if row["split"] == "train":
      if time.monotonic() >= self._next_line or row["step"] == self._steps:
        self._line(row)
        self._next_line = time.monotonic() + self._seconds
    elif row["split"] != "depth":
      if _CONSOLE_EVENTS.get(row.get("event", ""), row) is not None:
        self._line(row)

  def _line(self, row: Row) -> None:
    shown = _CONSOLE_EVENTS.get(row.get("event", "")) or row
    shown = _CONSOLE_TRAIN if row["split"] == "train" else shown
    values = [
      f"{name} {_short(row[name])}"
      for name in shown
      if name not in ("step", "split", "event")
      and row.get(name) is not None
      and not isinstance(row[name], list)
    ]
    if row["split"] == "train" and row.get("step_seconds"):
      seconds = (self._steps - row["step"]) * row["step_seconds"]
      values.append(f"left {datetime.timedelta(seconds=round(seconds))}")
    head = f"step {row['step']}/{self._steps} {row.get('event', row['split'])}"
    text = head + ": " + ", ".join(values) if values else head
    print(text_table.printable(text), file=self._file, flush=True)


def _short(value: Any) -> str:
  return f"{value:.4g}" if isinstance(value, float) else str(value)
