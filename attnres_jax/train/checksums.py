# SPDX-License-Identifier: Apache-2.0
"""Checksums of all files of a checkpoint, written when it is committed.

`checksums.json` in the folder of a checkpoint lists all other files with their
sizes and the XXH3 (128 bits) of each block of `BLOCK_BYTES`. When a checkpoint
is read, several threads compare the blocks at the same time, and the processes
of a run divide them among themselves.

Orbax may still be writing its own `_CHECKPOINT_METADATA` then. The checksum of
that file covers what was saved with the arrays: configuration, data position.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
import contextlib
import io
import json
import os
from typing import Any, cast

from etils import epath
import xxhash

from attnres_jax.common import files

FILE = "checksums.json"
BLOCK_BYTES = 1 << 26
_SMALL_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 18
_METADATA = "_CHECKPOINT_METADATA"
_INFO = "custom_metadata"
_THREADS = min(8, os.cpu_count() or 1)


class DamageError(Exception):
  """A file has changed since the checkpoint was committed."""


def write(folder: epath.Path, info: Mapping[str, Any]) -> None:
  """Writes the checksums of a checkpoint.

  Args:
    folder: of the checkpoint, with all arrays.
    info: the JSON object that is saved with the arrays.
  """
  sums: dict[str, Any] = {_METADATA: {"xxh3": [_digest_of(info)]}}
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    for path in _walk(folder):
      name = path.relative_to(folder).as_posix()
      if name == _METADATA:
        continue
      size = path.stat().length
      starts = range(0, size, BLOCK_BYTES)
      digests = pool.map(lambda at, path=path: _block_digest(path, at), starts)
      sums[name] = {"bytes": size, "xxh3": list(digests)}
  text = json.dumps({"files": sums, "xxh3": _digest_of(sums)}, indent=1)
  files.write(folder / FILE, text + "\n")


@contextlib.contextmanager
def verifying(
  folder: epath.Path, parts: tuple[str, ...], index: int = 0, count: int = 1
) -> Iterator[bool]:
  """A context for reading a checkpoint, which is verified at the same time.

  Args:
    folder: of the checkpoint.
    parts: the subfolders that are read; files outside subfolders always are.
    index: of this process.
    count: of all processes, each of which compares its share of the blocks.

  Yields:
    Whether there are checksums; old checkpoints have none.

  Raises:
    DamageError: a file is missing or has changed. It replaces any exception
      that reading the checkpoint raised.
  """
  listed = _listed(folder)
  if listed is None:
    yield False
    return
  quick, slow = [], []
  for name, entry in listed.items():
    if "/" not in name or name.partition("/")[0] in parts:
      size, *blocks = _checks(folder, name, entry)
      is_small = entry.get("bytes", 0) <= _SMALL_BYTES
      quick.append(size)
      (quick if is_small else slow).extend(blocks)
  pool = futures.ThreadPoolExecutor(_THREADS)
  try:
    # Fast comparisons come first, because readers of damaged files are noisy.
    for reason in pool.map(lambda check: check(), quick[index::count]):
      if reason:
        raise DamageError(reason)
    under_way = [pool.submit(check) for check in slow[index::count]]
    try:
      yield True
    finally:
      for future in under_way:
        reason = future.result()
        if reason:
          raise DamageError(reason)
  finally:
    pool.shutdown(cancel_futures=True)


def damage(folder: epath.Path) -> list[str] | None:
  """Each damaged file with the reason; None if there are no checksums."""
  try:
    listed = _listed(folder)
  except DamageError as error:
    return [str(error)]
  if listed is None:
    return None
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    checks = [c for item in listed.items() for c in _checks(folder, *item)]
    reasons = pool.map(lambda check: check(), checks)
    return list(dict.fromkeys(reason for reason in reasons if reason))


def check_metadata(folder: epath.Path) -> None:
  """Compares the metadata of a checkpoint, without its arrays.

  Raises:
    DamageError: it has changed.
  """
  listed = _listed(folder)
  for check in _checks(folder, _METADATA, (listed or {}).get(_METADATA, {})):
    reason = check()
    if reason and listed is not None:
      raise DamageError(reason)


def num_bytes(folder: epath.Path) -> int:
  """The size of all files in a folder."""
  return sum(path.stat().length for path in _walk(folder))


def _listed(folder: epath.Path) -> dict[str, dict[str, Any]] | None:
  path = folder / FILE
  if not path.exists():
    return None
  try:
    values = files.read_json(path)
    listed = values["files"]
    if values["xxh3"] == _digest_of(listed):
      for name, entry in listed.items():
        if not all(map(files.is_name, name.split("/"))):
          raise ValueError("not the name of a file below")
        _check_entry(name, entry)
      return listed
  except (OSError, ValueError, KeyError, TypeError, AttributeError):
    pass
  raise DamageError(f"{FILE} is damaged")


def _check_entry(name: str, entry: Any) -> None:
  # Metadata has one digest and no size.
  size = 1 if name == _METADATA else entry["bytes"]
  if type(size) is not int or len(entry["xxh3"]) != -(-size // BLOCK_BYTES):
    raise ValueError("not a digest per block")


def _checks(
  folder: epath.Path, name: str, entry: Mapping[str, Any]
) -> list[Callable[[], str]]:
  """Functions that each compare a part of a file and return what is wrong."""
  path = folder / name

  def check_size() -> str:
    size = path.stat().length
    wrong = size != entry["bytes"]
    return f"{size} bytes instead of {entry['bytes']}" if wrong else ""

  def check_block(at: int) -> str:
    same = _block_digest(path, at) == entry["xxh3"][at // BLOCK_BYTES]
    return "" if same else "its content has changed"

  def check_metadata() -> str:
    same = [_digest_of(files.read_json(path).get(_INFO))] == entry.get("xxh3")
    return "" if same else "its content has changed"

  def run(check: Callable[..., str], *args: Any) -> str:
    try:
      reason = check(*args)
    except FileNotFoundError:
      reason = "it is missing"
    except (OSError, ValueError) as error:
      reason = f"it cannot be read ({error})"
    return f"{name}: {reason}" if reason else ""

  if name == _METADATA:
    return [lambda: run(check_metadata)]
  return [lambda: run(check_size)] + [
    lambda at=i * BLOCK_BYTES: run(check_block, at)
    for i in range(len(entry["xxh3"]))
  ]


def _block_digest(path: epath.Path, at: int) -> str:
  digest = xxhash.xxh3_128()
  # One buffer, small enough for a core's cache, spares memory bandwidth.
  buffer = memoryview(bytearray(_BUFFER_BYTES))
  left = BLOCK_BYTES
  with path.open("rb") as opened:
    file = cast(io.BufferedReader, opened)
    file.seek(at)
    while left and (count := file.readinto(buffer[:left])):
      digest.update(buffer[:count])
      left -= count
  return digest.hexdigest()


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
