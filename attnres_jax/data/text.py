# SPDX-License-Identifier: Apache-2.0
"""Text files as documents: a folder, JSON lines, Parquet, ArrayRecord.

The split of a file is decided by its relative path, of a record by its text.
"""

from collections.abc import Iterator, Sequence
import contextlib
import hashlib
import json
import os
from typing import Any

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax.data import documents
from attnres_jax.data import paths

_RECORDS_AT_ONCE = 256


class _Files:
  """The files of a source, and what identifies them."""

  source: str
  suffixes: Sequence[str] = ()
  # Whether a document is the field `config.text_field` of a record.
  has_fields = False

  def __init__(self, config: config_lib.DataConfig, field: str, path: str):
    self._field, self._path = field, path
    self._text_field = config.text_field
    self._files = paths.list_files(field, path, self.suffixes)

  def describe(self) -> dict[str, Any]:
    """The number of files and bytes, and a hash of the names and sizes."""
    sizes = [file.stat().length for file in self._files]
    names = paths.relative_names(self._path, self._files)
    listing = "".join(f"{size} {name}\n" for name, size in zip(names, sizes))
    return {
      "source": self.source,
      "files": len(sizes),
      "file_bytes": sum(sizes),
      "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
    } | ({"text_field": self._text_field} if self.has_fields else {})


class FolderDocuments(_Files):
  """One document per file; hidden files are left out."""

  source = "text"

  def __len__(self) -> int:
    return len(self._files)

  def iterate(self, start: int = 0) -> Iterator[documents.Document]:
    keys = paths.relative_names(self._path, self._files)
    for key, file in zip(keys[start:], self._files[start:]):
      text = file.read_bytes()
      _check_utf8(self._field, os.fspath(file), text)
      yield documents.Document(key, text)


class JsonlDocuments(_Files):
  """One document per line: an object with the text in `config.text_field`."""

  source, suffixes, has_fields = "jsonl", (".jsonl",), True
  _len: int | None = None

  def __len__(self) -> int:
    if self._len is None:
      self._len = sum(1 for _ in self._lines())
    return self._len

  def iterate(self, start: int = 0) -> Iterator[documents.Document]:
    for number, (where, line) in enumerate(self._lines()):
      if number >= start:
        text = self._parse(where, line)
        yield documents.Document(documents.content_key(text), text)

  def _lines(self) -> Iterator[tuple[str, bytes]]:
    for path in self._files:
      with path.open("rb") as file:
        for number, line in enumerate(file, 1):
          if line.strip():
            yield f"{os.fspath(path)}:{number}", line

  def _parse(self, where: str, line: bytes) -> bytes:
    try:
      record = json.loads(line)
    except (ValueError, RecursionError) as error:
      config_lib.fail(self._field, where, f"a line of JSON ({error})")
    if not isinstance(record, dict) or self._text_field not in record:
      names = ", ".join(record) if isinstance(record, dict) else "no object"
      config_lib.fail(
        "data.text_field",
        self._text_field,
        f"a field of every line ({where} has {names})",
      )
    text = record[self._text_field]
    if not isinstance(text, str):
      config_lib.fail(self._field, where, f"text in {self._text_field!r}")
    # JSON can contain half a surrogate pair, which is not valid UTF-8.
    return text.encode(errors="replace")


class ParquetDocuments(_Files):
  """One document per row: the string column `config.text_field`."""

  source, suffixes, has_fields = "parquet", (".parquet",), True

  def __init__(self, config: config_lib.DataConfig, field: str, path: str):
    try:
      import pyarrow
      from pyarrow import parquet
    except ImportError:
      paths.needs_extra("source", "parquet", "pyarrow", "data")
    super().__init__(config, field, path)
    self._parquet = parquet
    self._num_rows = 0
    for file in self._files:
      try:
        with parquet.ParquetFile(paths.local_file(file)) as opened:
          names, num_rows = opened.schema_arrow.names, opened.metadata.num_rows
      except pyarrow.ArrowInvalid as error:
        reason = " ".join(str(error).split())
        config_lib.fail(field, os.fspath(file), f"a Parquet file ({reason})")
      if self._text_field not in names:
        config_lib.fail(
          "data.text_field",
          self._text_field,
          f"a column of {file.name}: one of " + ", ".join(names),
        )
      self._num_rows += num_rows

  def __len__(self) -> int:
    return self._num_rows

  def iterate(self, start: int = 0) -> Iterator[documents.Document]:
    skip = start
    for file in self._files:
      with self._parquet.ParquetFile(paths.local_file(file)) as opened:
        for group in range(opened.num_row_groups):
          num_rows = opened.metadata.row_group(group).num_rows
          if skip >= num_rows:
            skip -= num_rows
            continue
          yield from self._rows(file, opened, group, skip)
          skip = 0

  def _rows(
    self, file: epath.Path, opened: Any, group: int, skip: int
  ) -> Iterator[documents.Document]:
    batches = opened.iter_batches(
      batch_size=_RECORDS_AT_ONCE,
      row_groups=[group],
      columns=[self._text_field],
    )
    for batch in batches:
      values = batch.column(0)[skip:] if skip else batch.column(0)
      skip = max(0, skip - len(batch))
      for value in values.to_pylist():
        if value is not None and not isinstance(value, str):
          kind = type(value).__name__
          config_lib.fail(
            "data.text_field",
            self._text_field,
            f"a column of strings ({file.name} holds {kind})",
          )
        text = (value or "").encode()
        yield documents.Document(documents.content_key(text), text)


class ArrayRecordDocuments(_Files):
  """One document per record; the whole record is UTF-8 text."""

  source, suffixes = "arrayrecord", (".array_record", ".arrayrecord")

  def __init__(self, config: config_lib.DataConfig, field: str, path: str):
    super().__init__(config, field, path)
    self._counts = []
    for file in self._files:
      with _array_record(field, file) as reader:
        self._counts.append(reader.num_records())

  def __len__(self) -> int:
    return sum(self._counts)

  def iterate(self, start: int = 0) -> Iterator[documents.Document]:
    skip = start
    for file, count in zip(self._files, self._counts):
      if skip >= count:
        skip -= count
        continue
      with _array_record(self._field, file) as reader:
        for first in range(skip, count, _RECORDS_AT_ONCE):
          last = min(first + _RECORDS_AT_ONCE, count)
          for number, text in enumerate(reader.read(first, last), first):
            where = f"record {number} of {os.fspath(file)}"
            _check_utf8(self._field, where, text)
            yield documents.Document(documents.content_key(text), text)
      skip = 0


@contextlib.contextmanager
def _array_record(field: str, path: epath.Path) -> Iterator[Any]:
  """Opens an ArrayRecord reader and closes it."""
  try:
    from array_record.python import array_record_module
  except ImportError:
    paths.needs_extra("source", "arrayrecord", "array-record", "data")
  reader = array_record_module.ArrayRecordReader(paths.local_file(path))
  if not reader.ok():
    config_lib.fail(field, os.fspath(path), "an ArrayRecord file")
  try:
    yield reader
  finally:
    reader.close()


def _check_utf8(field: str, where: str, text: bytes) -> None:
  try:
    text.decode()
  except UnicodeDecodeError as error:
    config_lib.fail(field, where, f"UTF-8 text ({error})")
