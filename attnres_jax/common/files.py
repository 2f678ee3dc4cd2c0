# SPDX-License-Identifier: Apache-2.0
"""Small files that are always complete, on disks and in object stores.

Every file that is written in one piece (config.json, summary.json, state.json,
reports) goes through `write`, so that a kill or a full disk leaves either the
old or the new text. Metrics are appended, and checkpoints committed, elsewhere.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import errno
import glob as glob_lib
import json
import os
import re
import shutil
import stat
from typing import Any, NoReturn

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax.common import stores
from attnres_jax.config import errors

# The limit of file systems on Linux and macOS.
NAME_BYTES = 255
_FULL = (errno.ENOSPC, errno.EDQUOT)
# C++ libraries report it as text.
_FULL_WORDS = ("no space left on device", "disk quota exceeded")


is_remote = stores.is_remote


def absolute(path: epath.PathLike) -> epath.Path:
  """A path that does not depend on the working directory.

  `epath.Path.absolute` would turn gs://BUCKET into a folder of this disk.
  """
  path = epath.Path(path)
  return path if is_remote(path) else path.absolute()


def is_file(path: epath.PathLike) -> bool:
  """Whether a path is a file that ends, unlike `/dev/zero` or a pipe."""
  path = epath.Path(path)
  return path.is_file() if is_remote(path) else os.path.isfile(path)


def glob(folder: epath.PathLike, pattern: str) -> list[str]:
  """The files below a folder that match, by their names relative to it.

  Only the pattern has wildcards (`**` for any folders): a folder named `run[1]`
  is that folder, which it is not for `epath.Path.glob`. Names that begin with a
  dot are left out. Files are in the order of their names.
  """
  root = os.fspath(folder)
  if not is_remote(root):
    names = glob_lib.glob(pattern, root_dir=root, recursive=True)
    return sorted(n for n in names if os.path.isfile(os.path.join(root, n)))
  where = f"{glob_lib.escape(root)}/{pattern}"
  with stores.reaching(root):
    about = stores.client(root).glob(where, detail=True)
  start = root.partition("://")[2].rstrip("/") + "/"
  names = [n.removeprefix(start) for n in about if about[n]["type"] == "file"]
  return sorted(name for name in names if not re.search(r"(^|/)\.", name))


class DiskFullError(OSError):
  """A disk is full; says which path, the space needed and the space free."""


def write(path: epath.PathLike, content: str | bytes) -> None:
  """Replaces a file: readers find either the old or the new content.

  A file that already has this content is left unchanged.

  Raises:
    OSError: it cannot be written; its old content is still there.
  """
  path = epath.Path(path)
  data = content.encode() if isinstance(content, str) else content
  if is_remote(path):
    stores.write(path, data)
    return
  with contextlib.suppress(OSError):
    if path.stat().length == len(data) and path.read_bytes() == data:
      return
  temporary = epath.Path(stores.temporary_of(path))
  try:
    with open(temporary, "wb") as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except OSError as error:
    temporary.unlink(missing_ok=True)
    if is_disk_full(error):
      raise disk_full(path, len(data)) from error
    raise


def read(path: epath.PathLike, start: int = 0) -> bytes:
  """The bytes of a file from `start`, which may be negative: the last ones.

  A device such as /dev/zero, which has no end, is an empty file.

  Raises:
    FileNotFoundError: there is no such file.
    OSError: it cannot be read.
  """
  if is_remote(path):
    return stores.read(path, start)
  with open(path, "rb") as file:
    size = os.fstat(file.fileno()).st_size
    start = start if start >= 0 else max(0, size + start)
    file.seek(start)
    return file.read(max(0, size - start))


def disk_full(path: epath.PathLike, needed: int | None = None) -> DiskFullError:
  """The error for a full disk, with the bytes needed, if known, and free."""
  free = _free_bytes(path)
  sizes = [] if needed is None else [f"{needed:,} bytes needed"]
  sizes += [] if free is None else [f"{free:,} free"]
  return DiskFullError(
    errno.ENOSPC,
    f"no space left on device: {', '.join(sizes) or 'full'}; free some and"
    " rerun the same command to resume",
    str(path),
  )


def check_space(path: epath.PathLike, needed: int) -> None:
  """Refuses to begin a file or folder for which there is not enough space.

  Raises:
    DiskFullError: the disk has less than `needed` bytes.
  """
  free = _free_bytes(path)
  if free is not None and free < needed:
    raise disk_full(path, needed)


@contextlib.contextmanager
def explaining_full_disk(
  path: epath.PathLike, needed: int | None = None
) -> Iterator[None]:
  """A context that turns any report of a full disk into a `disk_full`."""
  try:
    yield
  except Exception as error:
    if isinstance(error, DiskFullError) or not is_disk_full(error):
      raise
    raise disk_full(path, needed) from error


def _free_bytes(path: epath.PathLike) -> int | None:
  """Free space on the disk of a path, which may not exist yet.

  None for an object store.
  """
  if is_remote(path):
    return None
  folder = os.path.abspath(path)
  while not os.path.isdir(folder):
    folder = os.path.dirname(folder)
  return shutil.disk_usage(folder).free


def is_name(value: Any) -> bool:
  """Whether a value is the printable name of a file, never a path."""
  return (
    isinstance(value, str)
    and value not in ("", ".", "..")
    and not set(value) & set("/\\")
    and value.isprintable()
    and len(value.encode()) <= NAME_BYTES
  )


def check_path(
  name: str, path: str, schemes: Sequence[str] = ("gs", "s3", "az")
) -> epath.Path:
  """A path that can be looked up, on a disk or in a known kind of store.

  Raises:
    ConfigError: it cannot be.
  """
  scheme, remote, place = path.partition("://")
  if not path or "\0" in path or (remote and scheme not in schemes):
    kinds = [f"{scheme}://" for scheme in schemes]
    config_lib.fail_argument(name, path, " or ".join(["a local path", *kinds]))
  if remote and not place.partition("/")[0]:
    config_lib.fail_argument(name, path, f"a bucket, as in {scheme}://BUCKET")
  if remote:
    checked = epath.Path(path)
    with stores.reaching(path):
      stores.client(path).exists(path)
    return checked
  checked = epath.Path(path).expanduser()
  if any(len(os.fsencode(part)) > NAME_BYTES for part in checked.parts):
    config_lib.fail_argument(name, path, f"names of {NAME_BYTES} bytes at most")
  try:
    os.stat(checked)
  except (FileNotFoundError, NotADirectoryError):
    pass
  except (OSError, ValueError) as error:  # Such as links in a circle.
    reason = getattr(error, "strerror", None) or error
    config_lib.fail_argument(name, path, f"a path that can be read ({reason})")
  return checked


def check_folder(name: str, path: str, *, writable: bool = True) -> epath.Path:
  """A folder that exists or can be made, and can be written to.

  A command that only reads says so. The argument's name is for the error.

  Raises:
    ConfigError: neither is true.
  """
  if is_remote(path) and glob_lib.has_magic(path):
    config_lib.fail_argument(
      name, path, "a name without *, ? and [, wildcards of object stores"
    )
  folder = check_path(name, path, ("gs", "s3"))
  if is_remote(folder):
    return folder
  place = os.path.abspath(folder)
  try:
    while not os.path.lexists(place):
      place = os.path.dirname(place)
    is_folder = stat.S_ISDIR(os.stat(place).st_mode)
  except OSError as error:
    config_lib.fail_argument(name, path, f"a folder ({error.strerror})")
  if not is_folder:
    config_lib.fail_argument(name, path, f"a folder ({place} is not)")
  access = os.W_OK | os.X_OK if writable else os.R_OK | os.X_OK
  if not os.access(place, access):
    kind = "write" if writable else "read"
    config_lib.fail_argument(name, path, f"{kind} access to {place}")
  return folder


def refuse_foreign(
  name: str,
  folder: epath.PathLike,
  ours: Mapping[str, Sequence[str]],
  is_known: Callable[[], bool] = lambda: False,
) -> None:
  """Refuses a folder in which a file of ours would replace somebody's.

  Args:
    name: of the argument that names the folder, for the error.
    folder: which may not exist.
    ours: each file that will be written, with marks that only ours has: columns
      of a CSV file, keys of the first object in a JSON file (in the first line
      of JSON lines), words of any other text.
    is_known: whether the folder is ours, if no file shows it. It is asked about
      a file that cannot be read: a damaged one of ours, or somebody's.

  Raises:
    ConfigError: names the first file that is not ours.
  """
  ownership = {}
  for file, marks in ours.items():
    try:
      if content := read(epath.Path(folder) / file):
        ownership[file] = _has_marks(file, content, marks)
    except (FileNotFoundError, NotADirectoryError):
      pass
    except IsADirectoryError:
      ownership[file] = False
  for file, is_ours in ownership.items():
    of_ours = is_ours is None and (True in ownership.values() or is_known())
    if not (is_ours or of_ours):
      fail_foreign(name, folder, file)


def check_output(name: str, path: epath.PathLike, marks: Sequence[str]) -> None:
  """Refuses to write the file that an argument names over somebody else's.

  The new file has these marks; see `refuse_foreign`.

  Raises:
    ConfigError: somebody else's file is there.
  """
  path = check_path(name, os.fspath(path))
  if path.is_dir():
    config_lib.fail_argument(
      name, str(path), "a file, which this folder is not"
    )
  refuse_foreign(name, path.parent, {path.name: marks})


def write_output(
  name: str, path: epath.PathLike, content: str, marks: Sequence[str]
) -> None:
  """Writes a file, after `check_output`, in a folder that is made if needed."""
  check_output(name, path, marks)
  path = epath.Path(path)
  if not is_remote(path):
    path.parent.mkdir(parents=True, exist_ok=True)
  write(path, content)


def fail_foreign(name: str, folder: epath.PathLike, file: str) -> NoReturn:
  """Raises the error of `refuse_foreign`."""
  config_lib.fail_argument(
    name, str(folder),
    f"a place without files of others; {file}, which is there, would be"
    " replaced",
  )  # fmt: skip


def _has_marks(file: str, content: bytes, marks: Sequence[str]) -> bool | None:
  """Whether a file is ours; None if it cannot be read."""
  first = content.partition(b"\n")[0]
  try:
    if file.endswith(".csv"):
      return set(marks) <= set(first.decode().strip().split(","))
    if not file.endswith((".json", ".jsonl")):
      return all(mark.encode() in content for mark in marks)
    values = json.loads(first if file.endswith("l") else content)
  except (ValueError, RecursionError):
    return None
  if isinstance(values, list):
    values = values[:1] and values[0]
  if values == {}:  # Nobody's in particular.
    return None
  return isinstance(values, dict) and set(marks) <= values.keys()


def is_disk_full(error: BaseException | None) -> bool:
  """Whether an exception or one of its causes says that a disk is full."""
  return any(
    getattr(each, "errno", None) in _FULL
    or any(words in str(each).lower() for words in _FULL_WORDS)
    for each in errors.chain(error)
  )
