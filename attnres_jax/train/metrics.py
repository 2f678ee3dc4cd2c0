# SPDX-License-Identifier: Apache-2.0
"""Rows of a run: metrics.jsonl, its writer, and its readers.

A row is a flat dict with `step`, `split` (train, validation, depth or event)
and numbers, lists of numbers or short texts. Process 0 writes. metrics.jsonl is
append-only and written row by row. When a run resumes at step n, rows of later
steps are removed first, because they will be computed again with the same
values. `event` rows stay: they are the history of the run, including its
interruptions. All other rows are in the order of their steps, so the end of the
file is enough to resume.
"""

from collections.abc import Mapping
import dataclasses
import json
import math
from typing import Any

from etils import epath
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import files
from attnres_jax.common import records
from attnres_jax.config import fields
from attnres_jax.train import console as console_lib

Row = Mapping[str, Any]

FILE = "metrics.jsonl"
_TAIL_BYTES = 1 << 20
_END_BYTES = 1 << 16


class MetricsError(config_lib.RunError, ValueError):
  """A line of metrics.jsonl is damaged."""


class Writer:
  """Writes rows of a run to metrics.jsonl, and lines for people."""

  def __init__(
    self,
    file: "JsonlSink | None" = None,
    lines: console_lib.Console | None = None,
  ):
    """Without a `file`, as on all processes but the first, it does nothing."""
    self._file, self._lines = file, lines

  def write(self, step: int, split: str, **values: Any) -> None:
    row = {"step": step, "split": split}
    row |= {name: _plain(value) for name, value in values.items()}
    if self._file is not None:
      self._file.write(row)
    if self._lines is not None:
      self._lines.write(row)

  def event(self, step: int, name: str, **values: Any) -> None:
    """An event, such as a save, a resume or a signal."""
    self.write(step, "event", event=name, **values)

  def flush(self) -> None:
    if self._file is not None:
      self._file.flush()

  def close(self) -> None:
    if self._file is not None:
      self._file.close()


def make_writer(
  workdir: epath.PathLike,
  config: config_lib.RunConfig,
  *,
  resume_step: int = 0,
  primary: bool = True,
  console: bool = True,
) -> Writer:
  """The writer of a run.

  Args:
    workdir: of the run; its metrics.jsonl is appended to.
    config: of the run.
    resume_step: rows after this step are removed from metrics.jsonl.
    primary: whether this process writes.
    console: whether it prints rows, too.
  """
  if not primary:
    return Writer()
  file = JsonlSink(epath.Path(workdir) / FILE, keep_through=resume_step)
  lines = console_lib.Console(config.train.steps) if console else None
  return Writer(file, lines)


def read_rows(
  workdir: epath.PathLike,
  split: str | None = None,
  lenient: bool = False,
) -> list[dict[str, Any]]:
  """The rows of a run, or of one split; [] if there are none.

  A last line without its end was truncated by a kill and is not a row.

  Args:
    workdir: of the run.
    split: whose rows; None takes all.
    lenient: leave out lines that are damaged.

  Raises:
    MetricsError: a line is damaged.
  """
  path = epath.Path(workdir) / FILE
  try:
    lines = files.read(path).split(b"\n")
  except FileNotFoundError:
    return []
  complete = list(enumerate(lines[:-1], start=1))
  if split is not None:
    complete = [(n, line) for n, line in complete if split.encode() in line]
  rows = []
  for number, line in complete:
    try:
      rows.append(_parse(line, f"{path}:{number}"))
    except MetricsError:
      if not lenient:
        raise
  return [row for row in rows if split in (None, row["split"])]


def last_rows(workdir: epath.PathLike) -> dict[str, dict[str, Any]]:
  """The last row of each split within the end of metrics.jsonl.

  Raises:
    MetricsError: a line is damaged.
  """
  path = epath.Path(workdir) / FILE
  try:
    end = files.read(path, -_END_BYTES)
  except FileNotFoundError:
    return {}
  # Neither a last line without its end nor a first one without its start.
  lines = end.split(b"\n")[:-1]
  cut = len(end) == _END_BYTES
  newest = {}
  for number, line in enumerate(lines[cut:], start=1):
    # Lines of a long file are not counted.
    row = _parse(line, path if cut else f"{path}:{number}")
    newest[row["split"]] = row
  return newest


@dataclasses.dataclass(frozen=True)
class Tail:
  """The end of metrics.jsonl, after the last row that a resumed run keeps.

  Attributes:
    rows: after it: of later steps, or events.
    lines: the same, as written in the file.
    last_step: of the row before them; 0 where there is none.
    start: bytes of the file before them.
    clean: whether there is nothing else after `start`.
  """

  rows: list[dict[str, Any]]
  lines: list[bytes]
  last_step: int
  start: int
  clean: bool


def read_tail(workdir: epath.PathLike, step: int) -> Tail:
  """All rows after the last one, ignoring events, of a step up to `step`.

  Lines that are not rows are left out; their steps will be computed again.
  """
  path = epath.Path(workdir) / FILE
  size = path.stat().length if path.exists() else 0
  length = min(size, _TAIL_BYTES)
  while True:
    start, lines = size - length, [b""]
    if size:
      lines = files.read(path, start)[:length].split(b"\n")
    clean = not lines.pop()
    later: list[tuple[bytes, dict[str, Any]]] = []
    last_step = None
    # What comes first is part of a line, unless it is the start of the file.
    while last_step is None and len(lines) > (start > 0):
      try:
        row = _parse(lines[-1], path)
      except MetricsError:
        clean = False
        lines.pop()
        continue
      if row["split"] != "event" and row["step"] <= step:
        last_step = row["step"]
      else:
        later.append((lines.pop(), row))
    if last_step is not None or not start:
      break
    length = min(size, 4 * length)
  later.reverse()
  return Tail(
    rows=[row for _, row in later],
    lines=[line for line, _ in later],
    last_step=last_step or 0,
    start=start + sum(len(line) + 1 for line in lines),
    clean=clean,
  )


class JsonlSink:
  """One JSON object per line.

  On a local disk, every row is appended at once. Object stores cannot append,
  so there the file is rewritten at every flush, which the training loop
  requests before each checkpoint and at the end.
  """

  def __init__(self, path: epath.Path, keep_through: int):
    self._path = path
    self._remote = files.is_remote(path)
    self._content = bytearray()
    tail = read_tail(path.parent, keep_through)
    events = [
      line
      for line, row in zip(tail.lines, tail.rows)
      if row["split"] == "event"
    ]
    if self._remote or len(events) < len(tail.lines) or not tail.clean:
      old = files.read(path)[: tail.start] if path.exists() else b""
      self._content += old + b"".join(line + b"\n" for line in events)
      files.write(path, bytes(self._content))
    if not self._remote:
      self._content.clear()
      # Unbuffered: a row that a full disk refused must not come back later.
      self._file = open(path, "ab", buffering=0)

  def write(self, row: Row) -> None:
    line = _dump(row).encode()
    if self._remote:
      self._content += line
      return
    while line:
      line = line[self._file.write(line) :]

  def flush(self) -> None:
    if self._remote:
      files.write(self._path, bytes(self._content))

  def close(self) -> None:
    self.flush()
    if not self._remote:
      self._file.close()


def _plain(value: Any) -> Any:
  """Arrays and numpy scalars to JSON values; nan and inf to None."""
  if hasattr(value, "dtype"):
    value = np.asarray(value).tolist()
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  if isinstance(value, Mapping):
    return {name: _plain(item) for name, item in value.items()}
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def _dump(row: Row) -> str:
  return json.dumps(row, allow_nan=False) + "\n"


@dataclasses.dataclass(frozen=True)
class Place(records.Record):
  """Keys that all rows have."""

  others = True
  step: fields.Count
  split: str


def _parse(line: bytes, where: object) -> dict[str, Any]:
  """The row on a line.

  Raises:
    MetricsError: the line is not a row.
  """
  try:
    return config_lib.from_json(line, where, _checked)
  except config_lib.ConfigError as error:
    raise MetricsError(
      f"{error}; restore the file, or remove this line to do without it"
    ) from error


def _checked(row: dict[str, Any]) -> dict[str, Any]:
  Place.of_values(row)
  return row
