# SPDX-License-Identifier: Apache-2.0
"""Flat token files (.bin): little-endian ids, one after the other.

Two forms, told apart by looking, never by a flag:

- a headerless file `x.bin` with a sidecar `x.json`, which `prepare` writes and
  anybody can write by hand. Required: "dtype" ("uint16" or "uint32") and
  "count". Optional: "vocab_size", "separator_id" (the id that opens every
  document), "tokenizer" (an object with "name" and, of a vocabulary file,
  "sha256"), "sha256" (of the ids' bytes), "header_bytes" (to skip, default 0);
- shards of llm.c: 256 int32 (magic, version, count, zeros), then the ids.
  Magic 20240520, version 1 is GPT-2's vocabulary in uint16; 20240801, version
  7 is Llama 3's in uint32.

Local files are memory-mapped; remote ones are copied to a cache first.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
import json
import os
from typing import Any, NoReturn

from etils import epath
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.data import documents
from attnres_jax.data import paths
from attnres_jax.data import tokens as tokens_lib

# Written by `prepare` into its output folder.
DATASET_FILE = "dataset.json"

DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

_LLMC_HEADER_BYTES = 256 * 4
# Magic: version, dtype, vocabulary, the id that opens a document.
_LLMC_FORMATS = {
  20240520: (1, "uint16", 50257, 50256),
  20240801: (7, "uint32", 128256, 128000),
}
# llm.c and its relatives put these into the names of their files.
_MARKS = {documents.TRAIN: "train", documents.VALIDATION: "val"}
# Up to here every id is compared with the vocabulary, and the hash with the
# sidecar's, when a file is opened; of larger data windows are compared with the
# vocabulary, and every row when it is read.
_FULL_SCAN_BYTES = 256 << 20
_WINDOW_BYTES = 64 << 10
_NUM_WINDOWS = 64


@dataclasses.dataclass(frozen=True)
class TokenFile:
  """One file and what its sidecar or header says of it."""

  path: epath.Path
  dtype: str
  count: int
  header_bytes: int = 0
  vocab_size: int | None = None
  separator_id: int | None = None
  tokenizer: dict[str, Any] | None = None
  sha256: str | None = None

  def map(self) -> np.ndarray:
    """The ids, memory-mapped."""
    dtype = DTYPES[self.dtype]
    if not self.count:
      return np.zeros(0, dtype)
    local = paths.local_file(self.path)
    return np.memmap(
      local, dtype, mode="r", offset=self.header_bytes, shape=(self.count,)
    )


def open_tokens(
  config: config_lib.DataConfig, split: str, tokenizer: Any
) -> tokens_lib.Tokens:
  """Opens the token files of a split.

  Raises:
    ConfigError: files missing, cut off, of no known form, or written with
      another tokenizer.
  """
  files = find(config, split)
  for file in files:
    _check_tokenizer(config, file, tokenizer.describe())
  separators = {file.separator_id for file in files}
  arrays = [file.map() for file in files]
  _check_content(files, arrays, tokenizer.vocab_size)
  return tokens_lib.Tokens(
    arrays,
    vocab_size=tokenizer.vocab_size,
    separator_id=separators.pop() if len(separators) == 1 else None,
    description={
      "source": "tokens",
      "split": split,
      "files": [_identify(file, array) for file, array in zip(files, arrays)],
    },
  )


def declared_vocabulary(
  config: config_lib.DataConfig,
) -> tuple[int, int | None]:
  """Vocabulary size and separator that the training files declare."""
  files = find(config, documents.TRAIN)
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
  root = epath.Path(path).expanduser()
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
  """Reads sidecar or llm.c header and compares it with the file's size."""
  if not path.is_file():
    config_lib.fail(field, os.fspath(path), "an existing token file")
  sidecar = path.with_suffix(".json")
  if sidecar.is_file():
    file = _from_sidecar(field, path, sidecar)
    told_by = sidecar.name
  else:
    file = _from_llmc_header(field, path)
    told_by = "its header"
  itemsize = DTYPES[file.dtype].itemsize
  expected = file.header_bytes + file.count * itemsize
  size = path.stat().length
  if size != expected:
    config_lib.fail(
      field,
      os.fspath(path),
      f"a file of {expected} bytes, as {told_by} says ({file.count}"
      f" {file.dtype} ids), not of {size}: it is cut off or damaged",
    )
  return file


def _from_sidecar(
  field: str, path: epath.Path, sidecar: epath.Path
) -> TokenFile:
  def bad(what: str) -> NoReturn:
    config_lib.fail(field, os.fspath(sidecar), f"a sidecar with {what}")

  try:
    values = json.loads(sidecar.read_text())
  except ValueError as error:
    bad(f"JSON inside ({error})")
  if not isinstance(values, dict):
    bad("a JSON object inside")
  if values.get("dtype") not in DTYPES:
    bad('"dtype" one of ' + ", ".join(DTYPES))
  for name in ("count", "header_bytes", "vocab_size", "separator_id"):
    value = values.get(name)
    missing = value is None and name != "count"
    if not missing and (type(value) is not int or value < 0):
      bad(f'"{name}" an integer of at least 0')
  if not isinstance(values.get("tokenizer"), dict | None):
    bad('"tokenizer" an object')
  if not isinstance(values.get("sha256"), str | None):
    bad('"sha256" a string')
  return TokenFile(
    path=path,
    dtype=values["dtype"],
    count=values["count"],
    header_bytes=values.get("header_bytes") or 0,
    vocab_size=values.get("vocab_size"),
    separator_id=values.get("separator_id"),
    tokenizer=values.get("tokenizer"),
    sha256=values.get("sha256"),
  )


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
  path = root / DATASET_FILE
  try:
    dataset = json.loads(path.read_text())
    complete = dataset["complete"]
  except (ValueError, TypeError, KeyError):
    config_lib.fail(field, os.fspath(path), "a file that prepare has written")
  if not complete:
    config_lib.fail(
      field,
      os.fspath(root),
      "a finished folder: prepare was interrupted, run it again to go on",
    )
  return [root / name for name in dataset["splits"][split]["files"]]


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


def _check_content(
  files: Sequence[TokenFile], arrays: Sequence[np.ndarray], vocab_size: int
) -> None:
  in_full = sum(array.nbytes for array in arrays) <= _FULL_SCAN_BYTES
  for file, array in zip(files, arrays):
    if in_full and file.sha256:
      found = hashlib.sha256(array.data).hexdigest()
      if found != file.sha256:
        config_lib.fail(
          "data.path",
          os.fspath(file.path),
          f"ids with the SHA-256 {file.sha256} of the sidecar (found {found})",
        )
    if vocab_size > np.iinfo(array.dtype).max:
      continue
    pieces = [array] if in_full else _windows(array)
    largest = max(int(piece.max(initial=0)) for piece in pieces)
    if len(array) and largest >= vocab_size:
      config_lib.fail(
        "data.path",
        os.fspath(file.path),
        f"token ids below the vocabulary size {vocab_size} (found {largest})",
      )


def _identify(file: TokenFile, array: np.ndarray) -> dict[str, Any]:
  """Name, size and hash: of all ids if the sidecar has it, else of windows."""
  found = {"name": file.path.name, "tokens": file.count, "dtype": file.dtype}
  if file.sha256:
    return found | {"sha256": file.sha256}
  digest = hashlib.sha256()
  for piece in _windows(array):
    digest.update(piece.tobytes())
  return found | {"sampled_sha256": digest.hexdigest()}


def _windows(array: np.ndarray) -> list[np.ndarray]:
  """Evenly spaced pieces, the first and the last ids among them."""
  size = _WINDOW_BYTES // array.itemsize
  if len(array) <= size * _NUM_WINDOWS:
    return [array]
  starts = np.linspace(0, len(array) - size, _NUM_WINDOWS).astype(np.int64)
  return [array[start : start + size] for start in starts]
