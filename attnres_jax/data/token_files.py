# SPDX-License-Identifier: Apache-2.0
"""Flat token files (.bin) of little-endian ids.

Each file `x.bin` has a sidecar `x.json`, which `prepare` writes, and which can
also be written by hand. Required: "dtype" ("uint16" or "uint32"). Optional:
"count" (of ids; by default all of the file), "header_bytes" (to skip; 0 by
default, 1024 in shards of llm.c), "vocab_size", "separator_id" (the id between
documents), "tokenizer" (an object with "name" and, of a vocabulary file,
"sha256") and "sha256" (of the ids' bytes).

The token that separates documents is the one that the tokenizer has as its
separator, or the files are refused: a network would end its texts with one
token while `sample` waits for the other.

Every read checks that the file still has the size that it had when it was
opened; reading a memory map of a truncated file would kill the process. Remote
files are copied to a cache first.
"""

from collections.abc import Iterator, Sequence
from concurrent import futures
import dataclasses
import functools
import hashlib
import os
from typing import Any, Literal, NoReturn

from etils import epath
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import files as files_lib
from attnres_jax.common import records
from attnres_jax.config import fields
from attnres_jax.data import documents
from attnres_jax.data import packing
from attnres_jax.data import paths

# Written by `prepare` into its output folder.
DATASET_FILE = "dataset.json"

DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

# Up to this size, all ids are checked against the vocabulary, and the hash
# against the sidecar's, when a file is opened. For larger data, samples are
# checked against the vocabulary, and every row when it is read.
_FULL_SCAN_BYTES = 256 << 20
_PIECE_BYTES = 64 << 10
_NUM_PIECES = 64
# Of headers, at a time: a store answers each after tens of milliseconds.
_REQUESTS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sidecar(records.Record):
  """The JSON beside a token file; see the module."""

  others = True
  dtype: Literal["uint16", "uint32"]
  count: records.Bytes | None = None
  header_bytes: records.Bytes | None = None
  vocab_size: fields.Size | None = None
  separator_id: fields.Count | None = None
  tokenizer: dict[str, Any] | None = None
  sha256: str | None = None


@dataclasses.dataclass(frozen=True)
class Split(records.Record):
  """What `prepare` has written of a split: numbers, and names of files."""

  others = True
  documents: records.Bytes
  bytes: records.Bytes
  tokens: records.Bytes
  files: tuple[records.FileName, ...]


@dataclasses.dataclass(frozen=True)
class Dataset(records.Record):
  """`dataset.json`; without all splits until it is complete."""

  others = True
  complete: bool
  settings: dict[str, Any]
  splits: dict[str, Split]

  def __post_init__(self):
    super().__post_init__()
    for split in documents.SPLITS if self.complete else ():
      self.require(split in self.splits, "splits", f"one of them, {split}")


@dataclasses.dataclass(frozen=True)
class TokenFile:
  """One file of `count` ids, with its sidecar."""

  file: paths.File
  header: Sidecar
  count: int

  def __len__(self) -> int:
    return self.count

  def __getitem__(self, where: slice) -> np.ndarray:
    """The ids of a slice, read now.

    Raises:
      DataError: the file is gone, or its size has changed.
      OSError: a disk or network fails, or the disk of the copies is full.
    """
    start, stop, _ = where.indices(self.count)
    span_bytes = max(0, stop - start) * self.dtype.itemsize
    offset = self.num_bytes - (self.count - start) * self.dtype.itemsize
    path = self.file.path
    try:
      with open(self._local, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        content = os.pread(file.fileno(), span_bytes, offset)
    except FileNotFoundError as error:
      raise packing.DataError(f"{path}: {error.strerror}") from error
    except OSError as error:
      if error.errno:  # With a name, an error of a store would lose its text.
        error.filename = error.filename or os.fspath(path)
      raise
    if size != self.num_bytes or len(content) != span_bytes:
      raise packing.DataError(
        f"{path}: has {size} bytes now, {self.num_bytes} when it was opened"
      )
    return np.frombuffer(content, self.dtype)

  @property
  def dtype(self) -> np.dtype:
    return DTYPES[self.header.dtype]

  @property
  def num_bytes(self) -> int:
    return (self.header.header_bytes or 0) + self.count * self.dtype.itemsize

  @functools.cached_property
  def _local(self) -> str:
    return self.file.local()


def open_tokens(
  config: config_lib.DataConfig, split: str, tokenizer: Any
) -> packing.Tokens:
  """Opens the token files of a split.

  Raises:
    ConfigError: files are missing, truncated, of no known form, or written with
      another tokenizer.
  """
  files = find(config, split)
  for file in files:
    _check_tokenizer(config, file, tokenizer)
  in_full = sum(file.num_bytes for file in files) <= _FULL_SCAN_BYTES
  stated = all(file.header.separator_id is not None for file in files)
  return packing.Tokens(
    files,
    vocab_size=tokenizer.vocab_size,
    separator_id=tokenizer.separator_id if stated else None,
    description={
      "source": "tokens",
      "split": split,
      "files": [_identify(f, tokenizer.vocab_size, in_full) for f in files],
    },
  )


def declared_vocabulary(
  config: config_lib.DataConfig,
) -> tuple[int, int | None]:
  """The vocabulary size and separator that the training files declare."""
  sizes, separators = [], []
  for part in config.each_path():
    for file in find(part, documents.TRAIN):
      if file.header.vocab_size is None:
        config_lib.fail(
          "data.tokenizer",
          "ids",
          'token files that declare their "vocab_size"'
          f" ({file.file.path} does not)",
        )
      sizes.append(file.header.vocab_size)
      if file.header.separator_id is not None:
        separators.append(file.header.separator_id)
  return max(sizes), min(separators, default=None)


def find(config: config_lib.DataConfig, split: str) -> list[TokenFile]:
  """The files of a split, with their headers and sizes checked."""
  field, path = "data.path", config.path
  if split == documents.VALIDATION and config.validation_path:
    field, path = "data.validation_path", config.validation_path
  root = files_lib.check_path(f"config.{field}", path)
  if (root / DATASET_FILE).is_file():
    return _prepared_files(field, root, split)
  files, shared = paths.splits(config, (".bin",))
  for folder in {file.path.parent for file in files[split]}:
    if (folder / DATASET_FILE).is_file():
      _finished(field, folder)
  if shared and split == documents.VALIDATION:
    config_lib.fail(
      field,
      path,
      'files with "train" and others with "val" as a word of their names, or'
      " data.validation_path (token files are not split)",
    )
  return _read_headers(files[split])


def _read_headers(files: Sequence[paths.File]) -> list[TokenFile]:
  """Reads the headers of many shards at the same time."""
  with futures.ThreadPoolExecutor(_REQUESTS) as pool:
    return list(pool.map(read_header, files))


def read_header(
  file: paths.File, sidecar_class: type[Sidecar] = Sidecar
) -> TokenFile:
  """Reads the sidecar and checks it against the file's size."""
  if not files_lib.is_file(file.path):
    file.fail("an existing token file")
  size = file.path.stat().length
  sidecar = file._replace(path=file.path.with_suffix(".json"))
  if not files_lib.is_file(sidecar.path):
    file.fail(f"a token file with a sidecar {sidecar.path.name} beside it")
  header = records.read(sidecar.path, sidecar_class)
  dtype = DTYPES[header.dtype]
  largest = min(np.iinfo(dtype).max, (header.vocab_size or 1 << 32) - 1)
  if (header.separator_id or 0) > largest:
    sidecar.fail(f'a sidecar with a "separator_id" up to {largest}')
  count = header.count
  if count is None:
    count = max(0, size - (header.header_bytes or 0)) // dtype.itemsize
  token_file = TokenFile(file, header, count)
  if size != token_file.num_bytes:
    file.fail(
      f"a file of {token_file.num_bytes} bytes, as {sidecar.path.name} says"
      f" ({count} {header.dtype} ids), not of {size}: it is cut off or damaged"
    )
  return token_file


def _prepared_files(
  field: str, root: epath.Path, split: str
) -> list[TokenFile]:
  written = _finished(field, root).splits[split]
  files = _read_headers(
    [paths.File(field, name, root / name) for name in written.files]
  )
  if sum(map(len, files)) != written.tokens:
    paths.File(field, DATASET_FILE, root).fail(
      f"files of {written.tokens} {split} tokens, as {DATASET_FILE} says"
      f" (they have {sum(map(len, files))})"
    )
  return files


def _finished(field: str, folder: epath.Path) -> Dataset:
  """The content of `dataset.json` of a folder that `prepare` has finished."""
  dataset = read_dataset(f"config.{field}", folder)
  if not dataset.complete:
    paths.File(field, DATASET_FILE, folder).fail(
      "a finished folder: prepare was interrupted, rerun it to resume"
    )
  return dataset


def read_dataset(name: str, folder: epath.Path) -> Dataset:
  """The content of `dataset.json`.

  Raises:
    ConfigError: `prepare` did not write it.
  """
  path = folder / DATASET_FILE
  try:
    return records.read(path, Dataset)
  except config_lib.ConfigError as error:
    config_lib.fail_argument(
      name, os.fspath(path), f"a file that prepare has written ({error})"
    )


def _check_tokenizer(
  config: config_lib.DataConfig, file: TokenFile, tokenizer: Any
) -> None:
  """Refuses a tokenizer that did not write the file."""
  path, header = file.file.path, file.header
  described = tokenizer.describe()

  def refuse(accepted: str) -> NoReturn:
    config_lib.fail("data.tokenizer", config.tokenizer, accepted)

  if header.separator_id not in (None, tokenizer.separator_id):
    theirs, ours = map(
      tokenizer.show_id, (header.separator_id, tokenizer.separator_id)
    )
    refuse(
      f"a tokenizer that separates documents as {path} does, by {theirs}, not"
      f" by {ours} (data.separator chooses another special token)"
    )
  if tokenizer.name == "ids":
    return
  written = header.tokenizer or {}
  for key in ("name", "sha256"):
    if key in written and written[key] != described.get(key):
      refuse(
        f"the tokenizer that {path} was written with"
        f" ({key} {written[key]!r}, not {described.get(key)!r})"
      )
  if (header.vocab_size or 0) > tokenizer.vocab_size:
    refuse(
      f"a tokenizer with the {header.vocab_size} ids that {path} declares"
      f" (it has {tokenizer.vocab_size}), or 'ids' to do without"
    )


def _identify(
  file: TokenFile, vocab_size: int, in_full: bool
) -> dict[str, Any]:
  """Name, size and hash of a file whose ids are checked: all, or samples."""
  digest, largest, stated = hashlib.sha256(), -1, file.header.sha256
  for ids in _pieces(file, in_full):
    digest.update(ids.data)
    largest = max(largest, int(ids.max(initial=0)))
  sha256 = digest.hexdigest()
  if in_full and stated not in (None, sha256):
    file.file.fail(
      f"ids with the SHA-256 {stated} of the sidecar (found {sha256})"
    )
  if file.count and largest >= vocab_size:
    file.file.fail(
      f"token ids below the vocabulary size {vocab_size} (found {largest})"
    )
  return {
    "name": file.file.path.name,
    "tokens": file.count,
    "dtype": file.header.dtype,
    "sha256" if in_full or stated else "sampled_sha256": stated or sha256,
  }


def _pieces(file: TokenFile, in_full: bool) -> Iterator[np.ndarray]:
  """All ids, or evenly spaced pieces that include the first and the last."""
  size = _PIECE_BYTES // file.dtype.itemsize
  starts: Sequence[int] = range(0, file.count, size)
  if not in_full and len(starts) > _NUM_PIECES:
    last = file.count - size
    starts = np.linspace(0, last, _NUM_PIECES).astype(np.int64).tolist()
  for start in starts:
    yield file[start : start + size]
