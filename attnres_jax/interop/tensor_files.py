# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: checked from their headers, read in parts, written.

A file is the length N of its header (8 bytes, little endian), N bytes of JSON
{name: {dtype, shape, data_offsets}}, and the arrays: row-major, little endian,
without gaps. A folder has one file, or several and an index that says which
tensor is in which. Arrays are read with `read`, not mapped, so that a process
holds no more of a file than it has asked for.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import hashlib
import json
import math
import os
import pathlib
from typing import Any, BinaryIO, NoReturn

import ml_dtypes
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import files

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_METADATA = "__metadata__"
_MOST_HEADER_BYTES = 100_000_000
# Of what is read at once.
_PIECE_BYTES = 4 << 20

# Those of weights; what others there are only matters for sizes.
DTYPES = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Those that can be read: codes of weights, too.
_READABLE = DTYPES | {"U8": np.dtype(np.uint8)}
_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()} | {
    "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
}  # fmt: skip


class TensorFileError(config_lib.RunError):
  """A file is damaged, or not what it should be; names file and tensor."""


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor in a file, of which nothing was read yet.

  Attributes:
    file: its path.
    name: in the file.
    dtype: a name such as "BF16".
    shape: of the tensor.
    start: where its bytes begin in the file.
  """

  file: pathlib.Path
  name: str
  dtype: str
  shape: tuple[int, ...]
  start: int

  def read(self, rows: slice, columns: slice) -> np.ndarray:
    """A part [rows, columns] of the tensor as a matrix, in its own dtype.

    Args:
      rows: of the first axis; from 0 to its size, without a step.
      columns: of all other axes, flattened.

    Raises:
      TensorFileError: the file ends before.
    """
    dtype = _READABLE[self.dtype]
    width = math.prod(self.shape[1:])
    row_bytes = width * dtype.itemsize
    count, wanted = rows.stop - rows.start, columns.stop - columns.start
    part = np.empty((count, wanted), dtype)
    step = count if wanted == width else max(1, _PIECE_BYTES // row_bytes)
    with open(self.file, "rb") as file:
      file.seek(self.start + rows.start * row_bytes)
      for at in range(0, count, step):
        piece = part[at : at + step]
        if wanted == width:
          self._fill(file, piece)
        else:
          whole = np.empty((len(piece), width), dtype)
          self._fill(file, whole)
          piece[...] = whole[:, columns]
    return part

  def _fill(self, file: BinaryIO, into: np.ndarray) -> None:
    view = _bytes_of(into)
    at = 0
    while at < len(view):
      reader: Any = file
      got = reader.readinto(view[at : at + _PIECE_BYTES])
      if not got:
        _fail(self.file, f"tensor {self.name!r} ends too early")
      at += got


def open_folder(folder: str | os.PathLike) -> dict[str, Tensor]:
  """All tensors of a checkpoint, by name, from the headers of its files.

  Raises:
    TensorFileError: a file is missing or damaged, or index and files differ.
  """
  folder = pathlib.Path(folder)
  single, index = folder / SINGLE, folder / INDEX
  if single.is_file() and index.is_file():
    _fail(index, f"beside {SINGLE}: only one of them should be here")
  if single.is_file():
    return read_header(single)
  if not index.is_file():
    _fail(index, f"neither this file nor {SINGLE} is here")
  return _open_shards(folder, index)


def _open_shards(
  folder: pathlib.Path, index: pathlib.Path
) -> dict[str, Tensor]:
  try:
    places = files.read_json(index)["weight_map"]
    names = set(places.values())
    if not all(isinstance(name, str) for name in names):
      raise ValueError("a name of a file is no string")
  except (KeyError, ValueError, AttributeError, TypeError) as error:
    _fail(index, f"no index of tensors ({error})")
  found: dict[str, Tensor] = {}
  for name in sorted(names):
    if pathlib.PurePath(name).name != name:
      _fail(index, f"{name!r} is no name of a file in this folder")
    if not (folder / name).is_file():
      _fail(folder / name, "named by the index, but not here")
    for tensor in read_header(folder / name).values():
      if tensor.name in found:
        other = found[tensor.name].file.name
        _fail(tensor.file, f"tensor {tensor.name!r} is also in {other}")
      if tensor.name not in places:
        _fail(tensor.file, f"tensor {tensor.name!r} is not in the index")
      found[tensor.name] = tensor
  for name, file in places.items():
    if name not in found or found[name].file.name != file:
      _fail(folder / file, f"has no tensor {name!r}, which the index promises")
  return found


def read_header(path: pathlib.Path) -> dict[str, Tensor]:
  """The tensors of one file, by name.

  Raises:
    TensorFileError: the header is damaged, or does not describe the file.
  """
  size = path.stat().st_size
  with open(path, "rb") as file:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(_MOST_HEADER_BYTES, size - 8):
      _fail(path, f"no safetensors file, or cut off: {size} bytes")
    text = file.read(length)
  try:
    entries = json.loads(text, object_pairs_hook=_without_duplicates)
    entries.pop(_METADATA, None)
  except (ValueError, AttributeError, TypeError, RecursionError) as error:
    _fail(path, f"its header cannot be read ({error})")
  found = [
    _tensor(path, name, entry, 8 + length) for name, entry in entries.items()
  ]
  end = 8 + length
  for tensor in sorted(found, key=lambda t: (t.start, num_bytes(t))):
    if tensor.start != end:
      _fail(path, f"tensor {tensor.name!r} overlaps, or follows a gap")
    end += num_bytes(tensor)
  if end != size:
    what = "cut off" if end > size else "with something after the last tensor"
    _fail(path, f"{size} bytes where its header describes {end}: {what}")
  return {tensor.name: tensor for tensor in found}


def num_bytes(tensor: Tensor) -> int:
  """The size of a tensor in its file."""
  return math.prod(tensor.shape) * _BYTES[tensor.dtype]


def _tensor(path: pathlib.Path, name: str, entry: Any, offset: int) -> Tensor:
  try:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
      raise ValueError
  except (KeyError, TypeError, ValueError):
    _fail(path, f"tensor {name!r} has no valid dtype, shape and offsets")
  if dtype not in _BYTES:
    _fail(path, f"tensor {name!r} has the unknown dtype {dtype!r}")
  tensor = Tensor(path, name, dtype, shape, offset + begin)
  if end - begin != num_bytes(tensor):
    _fail(path, f"tensor {name!r}: {end - begin} bytes for {dtype}{shape}")
  return tensor


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) < len(pairs):
    raise ValueError("a name occurs twice")
  return found


class Entry:
  """A tensor to be written.

  Attributes:
    name: in the file.
    dtype: a key of `DTYPES`.
    shape: of the tensor.
    make: returns it, in any dtype; called when it is written.
  """

  def __init__(
    self,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    make: Callable[[], np.ndarray],
  ):
    self.name, self.dtype, self.shape, self.make = name, dtype, shape, make

  @property
  def num_bytes(self) -> int:
    return math.prod(self.shape) * _BYTES[self.dtype]


def write_folder(
  folder: pathlib.Path, entries: Sequence[Entry], shard_bytes: int
) -> dict[str, str]:
  """Writes tensors as files of at most `shard_bytes`, and their index.

  A tensor that is larger has a file of its own. The index comes last.

  Returns:
    The SHA-256 of each file that was written.
  """
  shards = list(_shards(entries, shard_bytes))
  if len(shards) == 1:
    return {SINGLE: _write(folder / SINGLE, shards[0])}
  digests, places = {}, {}
  for number, shard in enumerate(shards, 1):
    name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
    digests[name] = _write(folder / name, shard)
    places |= {entry.name: name for entry in shard}
  total = sum(entry.num_bytes for entry in entries)
  index = {"metadata": {"total_size": total}, "weight_map": places}
  text = json.dumps(index, indent=2, sort_keys=True) + "\n"
  files.write(folder / INDEX, text)
  return digests | {INDEX: hashlib.sha256(text.encode()).hexdigest()}


def _shards(entries: Iterable[Entry], most: int) -> Iterable[list[Entry]]:
  shard: list[Entry] = []
  for entry in entries:
    total = sum(e.num_bytes for e in shard)
    if shard and total + entry.num_bytes > most:
      yield shard
      shard = []
    shard.append(entry)
  yield shard


def _write(path: pathlib.Path, entries: Sequence[Entry]) -> str:
  # Wide dtypes first keeps every tensor aligned.
  ordered = sorted(entries, key=lambda e: (-_BYTES[e.dtype], e.name))
  header: dict[str, Any] = {_METADATA: {"format": "pt"}}
  end = 0
  for entry in ordered:
    begin, end = end, end + entry.num_bytes
    header[entry.name] = dict(
      dtype=entry.dtype, shape=list(entry.shape), data_offsets=[begin, end]
    )
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  files.check_space(path, end)
  digest = hashlib.sha256()
  temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
  try:
    with files.explaining_full_disk(path, end), open(temporary, "wb") as file:

      def put(data: bytes | memoryview) -> None:
        file.write(data)
        digest.update(data)

      put(len(text).to_bytes(8, "little") + text)
      for entry in ordered:
        array = np.ascontiguousarray(entry.make().astype(DTYPES[entry.dtype]))
        if array.shape != entry.shape:
          raise ValueError(f"{entry.name}: {array.shape}, not {entry.shape}")
        put(_bytes_of(array))
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)
  return digest.hexdigest()


def _bytes_of(array: np.ndarray) -> memoryview:
  """The memory of a contiguous array."""
  flat: Any = array.reshape(-1).view(np.uint8)
  return memoryview(flat)


def _fail(path: pathlib.Path, what: str) -> NoReturn:
  raise TensorFileError(f"{path}: {what}")
