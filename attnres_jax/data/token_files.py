# SPDX-License-Identifier: Apache-2.0
"""Flat token files (.bin) of little-endian ids.

Two forms, which are distinguished by their content, not by a flag:

- a headerless file `x.bin` with a sidecar `x.json`, which `prepare` writes, and
  which can also be written by hand. Required: "dtype" ("uint16" or "uint32")
  and "count". Optional: "vocab_size", "separator_id" (the id that opens every
  document), "tokenizer" (an object with "name" and, of a vocabulary file,
  "sha256"), "sha256" (of the ids' bytes), "header_bytes" (to skip, default 0);
- shards of llm.c: 256 int32 (magic, version, count, zeros), then the ids.
  Magic 20240520, version 1 is GPT-2's vocabulary in uint16; 20240801, version
  7 is Llama 3's in uint32.

Every read checks that the file still has the size that it had when it was
opened; reading a memory map of a truncated file would kill the process. Remote
files are copied to a cache first.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import hashlib
import math
import os
from typing import Any, NoReturn

from etils import epath
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import files as files_lib
from attnres_jax.data import documents
from attnres_jax.data import paths
from attnres_jax.data import tokens as tokens_lib

# Written by `prepare` into its output folder.
DATASET_FILE = "dataset.json"

DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

_LLMC_HEADER_BYTES = 256 * 4
# Magic: version, dtype, vocabulary size, the id that opens a document.
_LLMC_FORMATS = {
  20240520: (1, "uint16", 50257, 50256),
  20240801: (7, "uint32", 128256, 128000),
}
# llm.c and related projects put these into file names.
_MARKS = {documents.TRAIN: "train", documents.VALIDATION: "val"}
# Up to this size, all ids are checked against the vocabulary, and the hash
# against the sidecar's, when a file is opened. For larger data, samples are
# checked against the vocabulary, and every row when it is read.
_FULL_SCAN_BYTES = 256 << 20
_WINDOW_BYTES = 64 << 10
_NUM_WINDOWS = 64
_PIECE_IDS = 1 << 22


@dataclasses.dataclass(frozen=True)
class TokenFile:
  """One file, with what its sidecar or header says about it."""

  path: epath.Path
  dtype: str
  count: int
  header_bytes: int = 0
  vocab_size: int | None = None
  separator_id: int | None = None
  tokenizer: dict[str, Any] | None = None
  sha256: str | None = None

  def __len__(self) -> int:
    return self.count

  def __getitem__(self, where: slice) -> np.ndarray:
    """The ids of a slice, read now.

    Raises:
      DataError: the file is gone, or its size has changed.
    """
    dtype = DTYPES[self.dtype]
    start, stop, _ = where.indices(self.count)
    wanted = max(0, stop - start) * dtype.itemsize
    try:
      with open(self._local, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        offset = self.header_bytes + start * dtype.itemsize
        content = os.pread(file.fileno(), wanted, offset)
    except OSError as error:
      raise tokens_lib.DataError(f"{self.path}: {error.strerror}") from error
    if size != self.num_bytes or len(content) != wanted:
      raise tokens_lib.DataError(
        f"{self.path}: has {size} bytes now, {self.num_bytes} when it was"
        " opened"
      )
    return np.frombuffer(content, dtype)

  @property
  def num_bytes(self) -> int:
    return self.header_bytes + self.count * DTYPES[self.dtype].itemsize

  @functools.cached_property
  def _local(self) -> str:
    return paths.local_file(self.path)


def open_tokens(
  config: config_lib.DataConfig, split: str, tokenizer: Any
) -> tokens_lib.Tokens:
  """Opens the token files of a split.

  Raises:
    ConfigError: files are missing, truncated, of no known form, or written with
      another tokenizer.
  """
  files = find(config, split)
  for file in files:
    _check_tokenizer(config, file, tokenizer.describe())
  separators = {file.separator_id for file in files}
  _check_content(files, tokenizer.vocab_size)
  return tokens_lib.Tokens(
    files,
    vocab_size=tokenizer.vocab_size,
    separator_id=separators.pop() if len(separators) == 1 else None,
    description={
      "source": "tokens",
      "split": split,
      "files": [_identify(file) for file in files],
    },
  )


def declared_vocabulary(
  config: config_lib.DataConfig,
) -> tuple[int, int | None]:
  """The vocabulary size and separator that the training files declare."""
  files = [
    file for part in config.each_path() for file in find(part, documents.TRAIN)
  ]
  sizes = []
  for file in files:
    if file.vocab_size is None:
      config_lib.fail(
        "data.tokenizer",
        "ids",
        f'token files that declare their "vocab_size" ({file.path} does not)',
      )
    sizes.append(file.vocab_size)
  return max(sizes, default=1), files[0].separator_id if files else None


def find(config: config_lib.DataConfig, split: str) -> list[TokenFile]:
  """The files of a split, with their headers and sizes checked."""
  field, path = "data.path", config.path
  if split == documents.VALIDATION and config.validation_path:
    field, path = "data.validation_path", config.validation_path
  root = files_lib.check_path(f"config.{field}", path)
  if (root / DATASET_FILE).is_file():
    chosen = _prepared_files(field, root, split)
  else:
    files = paths.list_files(field, path, (".bin",))
    if root.is_dir() and any(
      _in_split(file, s) for file in files for s in _MARKS
    ):
      chosen = [file for file in files if _in_split(file, split)]
    elif split == documents.TRAIN or field == "data.validation_path":
      chosen = files
    else:
      chosen = []
    if not chosen:
      accepted = f"a folder with *{_MARKS[split]}*.bin files"
      if field == "data.path" and split == documents.VALIDATION:
        accepted += ", or data.validation_path (token files are not split)"
      config_lib.fail(field, path, accepted)
  return [read_header(field, file) for file in chosen]


def read_header(field: str, path: epath.Path) -> TokenFile:
  """Reads the sidecar or llm.c header and checks it against the file's size."""
  if not path.is_file():
    config_lib.fail(field, os.fspath(path), "an existing token file")
  sidecar = path.with_suffix(".json")
  if sidecar.is_file():
    file = _from_sidecar(field, path, sidecar)
    told_by = sidecar.name
  else:
    file = _from_llmc_header(field, path)
    told_by = "its header"
  size = path.stat().length
  if size != file.num_bytes:
    config_lib.fail(
      field,
      os.fspath(path),
      f"a file of {file.num_bytes} bytes, as {told_by} says ({file.count}"
      f" {file.dtype} ids), not of {size}: it is cut off or damaged",
    )
  return file


def _from_sidecar(
  field: str, path: epath.Path, sidecar: epath.Path
) -> TokenFile:
  def bad(what: str) -> NoReturn:
    config_lib.fail(field, os.fspath(sidecar), f"a sidecar with {what}")

  try:
    values = files_lib.read_json(sidecar)
  except ValueError as error:
    bad(f"a JSON object inside ({error})")
  dtype = values.get("dtype")
  if not isinstance(dtype, str) or dtype not in DTYPES:
    bad('"dtype" one of ' + ", ".join(DTYPES))
  largest, size = int(np.iinfo(DTYPES[dtype]).max), values.get("vocab_size")
  if type(size) is int:
    largest = min(largest, size - 1)
  for name, least, most in (
    ("count", 0, math.inf),
    ("header_bytes", 0, math.inf),
    ("vocab_size", 1, 2**31 - 1),
    ("separator_id", 0, largest),
  ):
    value = values.get(name)
    if value is None and name != "count":
      values.pop(name, None)
    elif type(value) is not int or not least <= value <= most:
      bad(f'"{name}" an integer from {least} to {most}')
  for name, kind in (("tokenizer", dict), ("sha256", str)):
    if not isinstance(values.get(name), kind | None):
      bad(f'"{name}" of type {kind.__name__}')
  known = {field.name for field in dataclasses.fields(TokenFile)}
  return TokenFile(path, **{k: v for k, v in values.items() if k in known})


def _from_llmc_header(field: str, path: epath.Path) -> TokenFile:
  with path.open("rb") as file:
    header = np.frombuffer(file.read(3 * 4), "<i4")
  magic = int(header[0]) if len(header) == 3 else None
  if magic not in _LLMC_FORMATS:
    known = " or ".join(map(str, _LLMC_FORMATS))
    config_lib.fail(
      field,
      os.fspath(path),
      f"a token file: a sidecar {path.with_suffix('.json').name} beside it,"
      f" or an llm.c header with magic {known} (found {magic})",
    )
  version, dtype, vocab_size, separator_id = _LLMC_FORMATS[magic]
  if header[1] != version or header[2] < 0:
    config_lib.fail(
      field,
      os.fspath(path),
      f"an llm.c header of version {version} with a count of at least 0"
      f" (found version {header[1]}, count {header[2]})",
    )
  return TokenFile(
    path=path,
    dtype=dtype,
    count=int(header[2]),
    header_bytes=_LLMC_HEADER_BYTES,
    vocab_size=vocab_size,
    separator_id=separator_id,
  )


def _prepared_files(
  field: str, root: epath.Path, split: str
) -> list[epath.Path]:
  dataset = read_dataset(f"config.{field}", root)
  if not dataset["complete"]:
    config_lib.fail(
      field,
      os.fspath(root),
      "a finished folder: prepare was interrupted, rerun it to resume",
    )
  return [root / name for name in dataset["splits"][split]["files"]]


def read_dataset(name: str, folder: epath.Path) -> dict[str, Any]:
  """The content of `dataset.json`: complete, settings and, if complete, splits.

  Raises:
    ConfigError: `prepare` did not write it.
  """
  path = folder / DATASET_FILE
  try:
    dataset = files_lib.read_json(path)
    if not isinstance(dataset["complete"], bool):
      raise ValueError('"complete" is no boolean')
    dict.items(dataset["settings"])
    for split in documents.SPLITS if dataset["complete"] else ():
      written = dataset["splits"][split]
      if any(written[key] < 0 for key in ("documents", "bytes", "tokens")):
        raise ValueError("a count below 0")
      for file in written["files"]:
        files_lib.name_from_file(file, "files", path)
    dict.items(dataset["splits"])
  except (ValueError, TypeError, KeyError) as error:
    reason = f"{type(error).__name__}: {error}"
    config_lib.fail_argument(
      name, os.fspath(path), f"a file that prepare has written ({reason})"
    )
  return dataset


def _in_split(file: epath.Path, split: str) -> bool:
  return _MARKS[split] in file.name


def _check_tokenizer(
  config: config_lib.DataConfig, file: TokenFile, tokenizer: dict[str, Any]
) -> None:
  if tokenizer["name"] == "ids":
    return
  written = file.tokenizer or {}
  for key in ("name", "sha256"):
    if key in written and written[key] != tokenizer.get(key):
      config_lib.fail(
        "data.tokenizer",
        config.tokenizer,
        f"the tokenizer that {file.path} was written with"
        f" ({key} {written[key]!r}, not {tokenizer.get(key)!r})",
      )
  if (file.vocab_size or 0) > tokenizer["vocab_size"]:
    config_lib.fail(
      "data.tokenizer",
      config.tokenizer,
      f"a tokenizer with the {file.vocab_size} ids that {file.path} declares"
      f" (it has {tokenizer['vocab_size']}), or 'ids' to do without",
    )


def _check_content(files: Sequence[TokenFile], vocab_size: int) -> None:
  in_full = sum(file.num_bytes for file in files) <= _FULL_SCAN_BYTES
  for file in files:
    digest, largest = hashlib.sha256(), -1
    for ids in _pieces(file) if in_full else _windows(file):
      digest.update(ids.data)
      largest = max(largest, int(ids.max(initial=0)))
    if in_full and file.sha256 and digest.hexdigest() != file.sha256:
      config_lib.fail(
        "data.path",
        os.fspath(file.path),
        f"ids with the SHA-256 {file.sha256} of the sidecar (found"
        f" {digest.hexdigest()})",
      )
    if file.count and largest >= vocab_size:
      config_lib.fail(
        "data.path",
        os.fspath(file.path),
        f"token ids below the vocabulary size {vocab_size} (found {largest})",
      )


def _identify(file: TokenFile) -> dict[str, Any]:
  """Name, size and hash: of all ids if the sidecar has it, else of samples."""
  found = {"name": file.path.name, "tokens": file.count, "dtype": file.dtype}
  if file.sha256:
    return found | {"sha256": file.sha256}
  digest = hashlib.sha256()
  for ids in _windows(file):
    digest.update(ids.data)
  return found | {"sampled_sha256": digest.hexdigest()}


def _pieces(file: TokenFile) -> Iterator[np.ndarray]:
  """All ids, a few megabytes at a time."""
  for start in range(0, file.count, _PIECE_IDS):
    yield file[start : start + _PIECE_IDS]


def _windows(file: TokenFile) -> Iterator[np.ndarray]:
  """Evenly spaced pieces, including the first and the last ids."""
  size = _WINDOW_BYTES // DTYPES[file.dtype].itemsize
  starts = np.linspace(0, file.count - size, _NUM_WINDOWS).astype(np.int64)
  if file.count <= size * _NUM_WINDOWS:
    starts, size = [0], file.count
  for start in starts:
    yield file[start : start + size]
