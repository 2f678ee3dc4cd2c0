# SPDX-License-Identifier: Apache-2.0
"""Folders of safetensors: headers checked, tensors read in parts, written.

The library `safetensors` reads and writes the files. Beyond it, a name that
occurs twice in a header is refused, and so is an index that differs from the
files. Parts are read, not mapped, so that a process holds no more of a file
than it has asked for.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import json
import math
import os
import pathlib
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from attnres_jax import config as config_lib
from attnres_jax.common import files
from attnres_jax.common import records
from attnres_jax.common import stores

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Those of weights.
DTYPES = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
}


class TensorFileError(config_lib.RunError):
  """A file is damaged, or not what it should be; names file and tensor."""


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor in a file, of which nothing was read yet.

  The dtype is a name such as "BF16". `part` is the tensor as `safetensors`
  reads it.
  """

  file: pathlib.Path
  name: str
  dtype: str
  shape: tuple[int, ...]
  part: Any = dataclasses.field(repr=False, compare=False)

  def read(self, *index: slice) -> np.ndarray:
    """The part at a slice of each axis, in the tensor's dtype.

    Raises:
      TensorFileError: the file ends before.
    """
    try:
      return np.asarray(self.part[index or ...])
    except (safetensors.SafetensorError, OSError, ValueError) as error:
      fail(self.file, f"tensor {self.name!r} cannot be read ({error})")


def open_folder(folder: str | os.PathLike) -> dict[str, Tensor]:
  """All tensors of a checkpoint, by name, from the headers of its files.

  Raises:
    TensorFileError: a file is missing or damaged, index and files differ, or
      the folder has further files of weights.
    ConfigError: the index names something that is not a file of the folder.
  """
  folder = pathlib.Path(folder)
  single, index = folder / SINGLE, folder / INDEX
  if single.is_file() and index.is_file():
    fail(index, f"beside {SINGLE}: only one of them should be here")
  if not single.is_file() and not index.is_file():
    fail(index, f"neither this file nor {SINGLE} is here")
  tensors = _open_shards(index) if index.is_file() else read_header(single)
  used = {tensor.file.name for tensor in tensors.values()} | {SINGLE}
  for pattern in ("model*.safetensors", "adapter_model*"):
    for other in sorted(folder.glob(pattern)):
      if other.name not in used:
        fail(other, "part of the checkpoint, but not named by its index")
  return tensors


@dataclasses.dataclass(frozen=True)
class Index(records.Record):
  """The file of each tensor, of several."""

  others = True
  weight_map: dict[str, records.FileName]


def _open_shards(index: pathlib.Path) -> dict[str, Tensor]:
  try:
    places = records.read(index, Index).weight_map
  except config_lib.ConfigError as error:
    raise TensorFileError(str(error)) from error
  tensors: dict[str, Tensor] = {}
  for name in sorted(set(places.values())):
    path = index.with_name(name)
    if not path.is_file():
      fail(path, "named by the index, but not here")
    for tensor in read_header(path).values():
      if tensor.name in tensors:
        other = tensors[tensor.name].file.name
        fail(tensor.file, f"tensor {tensor.name!r} is also in {other}")
      if tensor.name not in places:
        fail(tensor.file, f"tensor {tensor.name!r} is not in the index")
      tensors[tensor.name] = tensor
  for name, file in places.items():
    if name not in tensors or tensors[name].file.name != file:
      path = index.with_name(file)
      fail(path, f"has no tensor {name!r}, which the index promises")
  return tensors


def read_header(path: pathlib.Path) -> dict[str, Tensor]:
  """The tensors of one file, by name.

  Raises:
    TensorFileError: the header is damaged, or does not describe the file.
  """
  try:
    opened = safetensors.safe_open(path, framework="np", backend="pread")
    with open(path, "rb") as file:
      length = int.from_bytes(file.read(8), "little")
      # Of a name that occurs twice, the library takes one.
      json.loads(file.read(length), object_pairs_hook=_check_no_duplicates)
    parts = {name: opened.get_slice(name) for name in opened.keys()}
  except (safetensors.SafetensorError, OSError, ValueError) as error:
    fail(path, f"no readable safetensors file ({error})")
  return {
    name: Tensor(path, name, part.get_dtype(), tuple(part.get_shape()), part)
    for name, part in parts.items()
  }


def _check_no_duplicates(pairs: list[tuple[str, Any]]) -> None:
  if len(dict(pairs)) < len(pairs):
    raise ValueError("a name occurs twice")


@dataclasses.dataclass(frozen=True)
class Entry:
  """A tensor to be written, in a dtype of `DTYPES`.

  `make` returns it, in any dtype; it is called when its file is written.
  """

  name: str
  dtype: str
  shape: tuple[int, ...]
  make: Callable[[], np.ndarray]

  @property
  def num_bytes(self) -> int:
    return math.prod(self.shape) * DTYPES[self.dtype].itemsize

  def array(self) -> np.ndarray:
    """The tensor in its dtype.

    Raises:
      TensorFileError: it has values that are not finite in this dtype.
    """
    with np.errstate(over="ignore"):
      array = np.ascontiguousarray(self.make().astype(DTYPES[self.dtype]))
    if not np.isfinite(array).all():
      raise TensorFileError(
        f"tensor {self.name!r} has values that are not finite in {self.dtype}"
      )
    return array.reshape(self.shape)


def write_folder(
  folder: pathlib.Path, entries: Sequence[Entry], shard_bytes: int
) -> None:
  """Writes tensors as files of at most `shard_bytes`, and their index.

  A larger tensor gets one file. One file at a time is in memory. The index
  comes last.
  """
  shards = list(_shards(entries, shard_bytes))
  if len(shards) == 1:
    _write(folder / SINGLE, shards[0])
    return
  places = {}
  for number, shard in enumerate(shards, 1):
    name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
    _write(folder / name, shard)
    places |= {entry.name: name for entry in shard}
  total = sum(entry.num_bytes for entry in entries)
  index = {"metadata": {"total_size": total}, "weight_map": places}
  files.write(
    folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n"
  )


def _shards(entries: Iterable[Entry], most: int) -> Iterable[list[Entry]]:
  shard: list[Entry] = []
  for entry in entries:
    total = sum(e.num_bytes for e in shard)
    if shard and total + entry.num_bytes > most:
      yield shard
      shard = []
    shard.append(entry)
  yield shard


def _write(path: pathlib.Path, entries: Sequence[Entry]) -> None:
  size = sum(entry.num_bytes for entry in entries)
  files.check_space(path, size)
  temporary = pathlib.Path(stores.temporary_of(path))
  arrays: Mapping[str, Any] = {entry.name: entry.array() for entry in entries}
  try:
    with files.explaining_full_disk(path, size):
      safetensors.numpy.save_file(
        dict(arrays), temporary, metadata={"format": "pt"}
      )
    with open(temporary, "rb") as file:
      os.fsync(file.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def fail(path: pathlib.Path, what: str) -> NoReturn:
  """Raises the one-line error of a file."""
  raise TensorFileError(f"{path}: {what}")
