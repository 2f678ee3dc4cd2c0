# SPDX-License-Identifier: Apache-2.0
"""Checksums of all files of a checkpoint, written when it is committed.

`checksums.json` in the folder of a checkpoint lists all other files with their
sizes and the XXH3 (128 bits) of each block of `BLOCK_BYTES`. All processes of a
run compare the blocks before they read a checkpoint.

Orbax may still be writing its own `_CHECKPOINT_METADATA` then. The checksum of
that file covers what was saved with the arrays: configuration, data position.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
import dataclasses
import io
import json
import os
from typing import Any, cast

from etils import epath
import xxhash

from attnres_jax import config as config_lib
from attnres_jax.common import files
from attnres_jax.common import records

FILE = "checksums.json"
BLOCK_BYTES = 1 << 26
_BUFFER_BYTES = 1 << 18
_METADATA = "_CHECKPOINT_METADATA"
_INFO = "custom_metadata"
_THREADS = min(8, os.cpu_count() or 1)


class DamageError(Exception):
  """A file has changed since the checkpoint was committed."""


@dataclasses.dataclass(frozen=True)
class Sums(records.Record):
  """The digest of each block of a file, and its size; metadata has none."""

  xxh3: tuple[str, ...]
  bytes: records.Bytes | None = None


@dataclasses.dataclass(frozen=True)
class Listing(records.Record):
  """`checksums.json`: the files of a checkpoint by path, and their digest."""

  files: dict[str, Sums]
  xxh3: str

  def __post_init__(self):
    super().__post_init__()
    for name, sums in self.files.items():
      # Metadata has one digest and no size.
      size = 1 if name == _METADATA else sums.bytes
      is_below = all(map(files.is_name, name.split("/")))
      number = None if size is None else -(-size // BLOCK_BYTES)
      self.require(is_below, "files", "names of files below")
      self.require(number == len(sums.xxh3), "files", "a digest per block")


def write(folder: epath.Path, info: Mapping[str, Any]) -> None:
  """Writes the checksums of a checkpoint's arrays and JSON object."""
  sums = {_METADATA: Sums((_digest_of(info),))}
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    for path in _walk(folder):
      name = path.relative_to(folder).as_posix()
      size = path.stat().length
      digest = lambda number, path=path: _block_digest(path, number)
      digests = pool.map(digest, range(-(-size // BLOCK_BYTES)))
      if name != _METADATA:
        sums[name] = Sums(tuple(digests), size)
  records.write(folder / FILE, Listing(sums, _digest_of_sums(sums)))


def damage(
  folder: epath.Path,
  parts: Sequence[str] | None = None,
  share: tuple[int, int] = (0, 1),
) -> list[str] | None:
  """Each damaged file with the reason; None if there are no checksums.

  With `parts`, subfolders to compare, beside files outside of any, such as
  metadata. `share` is the index of this process, and how many divide the
  blocks.
  """
  try:
    listed = _listed(folder)
  except DamageError as error:
    return [str(error)]
  if listed is None:
    return None
  blocks = [
    (name, sums, number)
    for name, sums in listed.items()
    if parts is None or "/" not in name or name.partition("/")[0] in parts
    for number in range(max(1, len(sums.xxh3)))
  ]
  index, count = share
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    check = lambda block: _damage_of(folder, *block)
    reasons = pool.map(check, blocks[index::count])
    return list(dict.fromkeys(filter(None, reasons)))


def num_bytes(folder: epath.Path) -> int:
  """The size of all files in a folder."""
  return sum(path.stat().length for path in _walk(folder))


def _listed(folder: epath.Path) -> dict[str, Sums] | None:
  try:
    listing = records.read(folder / FILE, Listing)
  except FileNotFoundError:
    return None
  except (OSError, config_lib.ConfigError):
    raise DamageError(f"{FILE} is damaged") from None
  if listing.xxh3 != _digest_of_sums(listing.files):
    raise DamageError(f"{FILE} is damaged")
  return listing.files


def _damage_of(folder: epath.Path, name: str, sums: Sums, number: int) -> str:
  """What is wrong with a block of a file, or with its size; "" if nothing."""
  path, digests = folder / name, [*sums.xxh3][number : number + 1]
  try:
    if name == _METADATA:
      actual = [_digest_of(records.read_object(path).get(_INFO))]
    elif (size := path.stat().length) != sums.bytes:
      return f"{name}: {size} bytes instead of {sums.bytes}"
    else:
      actual = [_block_digest(path, number)] if size else []
    return "" if actual == digests else f"{name}: its content has changed"
  except FileNotFoundError:
    return f"{name}: it is missing"
  except (OSError, ValueError) as error:
    return f"{name}: it cannot be read ({error})"


def _block_digest(path: epath.Path, number: int) -> str:
  digest = xxhash.xxh3_128()
  # One buffer, small enough for a core's cache, spares memory bandwidth.
  buffer = memoryview(bytearray(_BUFFER_BYTES))
  left = BLOCK_BYTES
  with path.open("rb") as opened:
    file = cast(io.BufferedReader, opened)
    file.seek(number * BLOCK_BYTES)
    while left and (count := file.readinto(buffer[:left])):
      digest.update(buffer[:count])
      left -= count
  return digest.hexdigest()


def _digest_of_sums(sums: Mapping[str, Sums]) -> str:
  return _digest_of({name: config_lib.to_dict(s) for name, s in sums.items()})


def _digest_of(values: Any) -> str:
  text = json.dumps(values, sort_keys=True)
  return xxhash.xxh3_128_hexdigest(text.encode())


def _walk(folder: epath.Path) -> Iterator[epath.Path]:
  """All files of a checkpoint except its checksums, in order."""
  for path in sorted(folder.iterdir()):
    if path.is_dir():
      yield from _walk(path)
    elif path.name != FILE:
      yield path
