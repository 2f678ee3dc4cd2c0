# SPDX-License-Identifier: Apache-2.0
"""What commands print: plain tables, and no control characters."""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import re
import sys
from typing import Any

# Controls but tab and line feed, line and paragraph separators, codes that
# reverse the order of what is read, and halves of surrogate pairs.
_STEERING = re.compile(
  "[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
  """A text without control characters, which could steer a terminal."""
  return _STEERING.sub("\ufffd", text)


class _Printable:
  """A stream, of which everything that is written is `printable`."""

  def __init__(self, stream: Any):
    self.unfiltered = stream
    strict = getattr(stream, "errors", None) == "strict"
    if strict and hasattr(stream, "reconfigure"):
      # Such as an accent on a terminal of ASCII.
      stream.reconfigure(errors="backslashreplace")

  def write(self, text: str) -> int:
    # A progress bar begins each write at the start of its line.
    start = "\r" if text.startswith("\r") else ""
    self.unfiltered.write(start + printable(text[len(start) :]))
    return len(text)

  def writelines(self, lines: Iterable[str]) -> None:
    self.write("".join(lines))

  def __getattr__(self, name: str) -> Any:
    return getattr(self.unfiltered, name)


@contextlib.contextmanager
def printable_outputs() -> Iterator[None]:
  """A context that prints no control characters: texts of others have them."""
  before = sys.stdout, sys.stderr
  ours = [stream and _Printable(stream) for stream in before]
  sys.stdout, sys.stderr = ours  # pyrefly: ignore
  try:
    yield
  finally:
    for name, stream, old in zip(("stdout", "stderr"), ours, before):
      if getattr(sys, name) is stream:
        setattr(sys, name, old)


def unfiltered(stream: Any) -> Any:
  """The stream without the filter, for codes of ours and data in a pipe."""
  return getattr(stream, "unfiltered", stream)


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
