# SPDX-License-Identifier: Apache-2.0
"""Text files as documents: a folder, JSON lines, Parquet.

Where the names of files do not decide (see `paths`), the split of a text file
is decided by its relative path and the split of a record by its text. A single
text file is split by position: its end, from the beginning of a line, is for
validation.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import hashlib
import json
from typing import Any, NamedTuple

from attnres_jax import config as config_lib
from attnres_jax.data import documents
from attnres_jax.data import paths

# A small file can decompress to more than the memory.
_DOCUMENT_BYTES = 1 << 31
_RECORDS_AT_ONCE = 256


@dataclasses.dataclass
class FileDocuments:
  """The documents of files, in this order.

  `part` is the split whose part of every text is read; "" for all of it.
  """

  config: config_lib.DataConfig
  files: Sequence[paths.File]
  part: str = ""

  def __post_init__(self):
    self._format = FORMATS[self.config.source]

  def iterate(self, start: int = 0) -> Iterator[documents.Document]:
    """Yields the documents from number `start` on."""
    for file in self.files:
      for where, value in self._format.read(file, self.config.text_field):
        if start:
          start -= 1
          continue
        text = _to_utf8(file, where, value, self.config.text_field)
        if self.config.source == "text":
          yield documents.Document(file.name, self._cut(text))
        else:  # Equal texts share a split.
          yield documents.Document(hashlib.sha256(text).hexdigest(), text)

  def describe(self) -> dict[str, Any]:
    """The number of files and bytes, and a hash of the names and sizes."""
    sizes = [file.path.stat().length for file in self.files]
    names = [file.name for file in self.files]
    listing = "".join(f"{size} {name}\n" for name, size in zip(names, sizes))
    return {
      "source": self.config.source,
      "files": len(sizes),
      "file_bytes": sum(sizes),
      "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
    } | ({"text_field": self.config.text_field} if self._format.fields else {})

  def _cut(self, text: bytes) -> bytes:
    """The part of a text that belongs to a split, if it has parts."""
    if not self.part:
      return text
    at = len(text) - round(len(text) * self.config.validation_fraction)
    line = text.find(b"\n", at) + 1
    at = line if 0 < line < len(text) else at
    while at < len(text) and text[at] & 0xC0 == 0x80:  # Inside a character.
      at += 1
    return text[:at] if self.part == documents.TRAIN else text[at:]


def _read_jsonl(file: paths.File, field: str) -> Iterator[tuple[str, Any]]:
  with file.reading("a file of lines"), file.open() as opened:
    number = 0
    while line := opened.readline(_DOCUMENT_BYTES + 1):
      number += 1
      if len(line) > _DOCUMENT_BYTES:
        file.fail(f"a line of at most {_DOCUMENT_BYTES} bytes", f":{number}")
      if line.strip():
        try:
          record = json.loads(line)
        except (ValueError, RecursionError) as error:
          file.fail(f"a line of JSON ({error})", f":{number}")
        if not isinstance(record, dict) or field not in record:
          names = ", ".join(record) if isinstance(record, dict) else "no object"
          line_keys = f"{file.path}:{number} has {names}"
          _no_field(field, f"a field of every line ({line_keys})")
        yield f":{number}", record[field]


def _to_utf8(file: paths.File, where: str, text: Any, field: str) -> bytes:
  """The bytes of a text; null, as anything else that is no text, is refused."""
  if isinstance(text, str):
    # JSON can contain half a surrogate pair, which is not valid UTF-8.
    return text.encode(errors="replace")
  if not isinstance(text, bytes):
    kind = "null" if text is None else f"a {type(text).__name__}"
    file.fail(f"text in {field!r}, not {kind}", where)
  try:
    text.decode()
  except UnicodeDecodeError as error:
    file.fail(f"UTF-8 text ({error})", where)
  return text


def _read_text(file: paths.File, field: str) -> Iterator[tuple[str, bytes]]:
  del field
  with file.reading("a text file"), file.open() as opened:
    text = opened.read(_DOCUMENT_BYTES + 1)
  if len(text) > _DOCUMENT_BYTES:
    file.fail(f"a text of at most {_DOCUMENT_BYTES} bytes")
  yield "", text


def _read_parquet(file: paths.File, field: str) -> Iterator[tuple[str, Any]]:
  pyarrow = paths.library("pyarrow", "data.source", "parquet")
  parquet = paths.library("pyarrow.parquet", "data.source", "parquet")
  with file.reading("a Parquet file"), file.path.open("rb") as content:
    opened = parquet.ParquetFile(content)
    columns = {column.name: column.type for column in opened.schema_arrow}
    if field not in columns:
      _no_field(field, f"a column of {file.path}: one of {', '.join(columns)}")
    if columns[field] not in (pyarrow.string(), pyarrow.large_string()):
      column_dtype = f"{file.path} has {columns[field]}"
      _no_field(field, f"a column of strings ({column_dtype})")
    number = 0
    for batch in opened.iter_batches(_RECORDS_AT_ONCE, columns=[field]):
      for value in batch.column(0).to_pylist():
        yield f", row {number}", value
        number += 1


def _no_field(field: str, accepted: str) -> None:
  config_lib.fail("data.text_field", field, accepted)


class _Format(NamedTuple):
  """How the texts of a file are found.

  Attributes:
    suffixes: of the files in a folder; empty for all.
    read: (file, text field) yields the place in the file and the text (str or
      bytes) of each.
    fields: whether a text is a field of a record.
  """

  suffixes: tuple[str, ...]
  read: Callable[[paths.File, str], Iterator[tuple[str, Any]]]
  fields: bool = False


FORMATS = {
  "jsonl": _Format((".jsonl",), _read_jsonl, True),
  "parquet": _Format((".parquet",), _read_parquet, True),
  "text": _Format((), _read_text),
}
