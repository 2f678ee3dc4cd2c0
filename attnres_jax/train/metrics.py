# SPDX-License-Identifier: Apache-2.0
"""Rows of a run: metrics.jsonl, its writer, and its readers.

A row is a flat dict with `step`, `split` (train, validation, depth or event)
and numbers, lists of numbers or short texts. Process 0 writes. metrics.jsonl is
append-only and written row by row. When a run resumes at step n, rows of later
steps are removed first, because they will be computed again with the same
values. `event` rows stay: they are the history of the run, including its
interruptions. All other rows are in the order of their steps.
"""

from collections.abc import Iterator, Mapping
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

FILE = "metrics.jsonl"
_END_BYTES = 1 << 16


class MetricsError(config_lib.RunError, ValueError):
  """A line of metrics.jsonl is damaged."""


class Writer:
  """Appends rows of a run to metrics.jsonl, and prints lines for people.

  On a local disk, every row is appended at once. Object stores cannot append,
  so there the file is rewritten at every flush, which the training loop
  requests before each checkpoint and at the end.
  """

  def __init__(
    self,
    workdir: epath.PathLike | None = None,
    resume_step: int = 0,
    lines: console_lib.Console | None = None,
  ):
    """Removes rows after `resume_step`, except events.

    Without a folder, as on all processes but the first, it writes nothing.
    """
    self._lines = lines
    self._path = None if workdir is None else epath.Path(workdir) / FILE
    self._file: Any = None
    if self._path is None:
      return
    stays = lambda r: r["split"] == "event" or r["step"] <= resume_step
    rows = _lines_of(self._path, lenient=True)
    content = b"".join(line + b"\n" for line, row in rows if stays(row))
    if not self._path.exists() or files.read(self._path) != content:
      files.write(self._path, content)
    if files.is_remote(self._path):
      self._content = bytearray(content)
    else:
      # Unbuffered: a row that a full disk refused must not come back later.
      self._file = open(self._path, "ab", buffering=0)

  def write(self, step: int, split: str, **values: Any) -> None:
    row = {"step": step, "split": split}
    row |= {name: _plain(value) for name, value in values.items()}
    line = json.dumps(row, allow_nan=False).encode() + b"\n"
    if self._file is not None:
      while line:
        line = line[self._file.write(line) :]
    elif self._path is not None:
      self._content += line
    if self._lines is not None:
      self._lines.write(row)

  def event(self, step: int, name: str, **values: Any) -> None:
    """An event, such as a save, a resume or a signal."""
    self.write(step, "event", event=name, **values)

  def flush(self) -> None:
    if self._path is not None and self._file is None:
      files.write(self._path, bytes(self._content))

  def close(self) -> None:
    self.flush()
    if self._file is not None:
      self._file.close()


def read_rows(
  workdir: epath.PathLike,
  split: str | None = None,
  lenient: bool = False,
) -> list[dict[str, Any]]:
  """The rows of a run, or of one split; [] if there are none.

  A last line without its end was truncated by a kill and is not a row.

  Raises:
    MetricsError: a line is damaged, unless `lenient` leaves it out.
  """
  path = epath.Path(workdir) / FILE
  word = (split or "").encode()
  rows = [row for _, row in _lines_of(path, lenient, word)]
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


def _lines_of(
  path: epath.Path, lenient: bool, word: bytes = b""
) -> Iterator[tuple[bytes, dict[str, Any]]]:
  """Each complete line with `word`, and its row; see `read_rows`."""
  try:
    lines = files.read(path).split(b"\n")[:-1]
  except FileNotFoundError:
    return
  for number, line in enumerate(lines, start=1):
    if word in line:
      try:
        yield line, _parse(line, f"{path}:{number}")
      except MetricsError:
        if not lenient:
          raise


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


@dataclasses.dataclass(frozen=True)
class Place(records.Record):
  """Keys that all rows have."""

  others = True
  step: fields.Count
  split: str


def _parse(line: bytes, where: object) -> dict[str, Any]:
  """The row on a line, or a MetricsError."""
  try:
    return config_lib.from_json(line, where, _checked)
  except config_lib.ConfigError as error:
    raise MetricsError(
      f"{error}; restore the file, or remove this line to do without it"
    ) from error


def _checked(row: dict[str, Any]) -> dict[str, Any]:
  Place(row.get("step"), row.get("split"))  # pyrefly: ignore
  return row
