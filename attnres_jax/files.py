# SPDX-License-Identifier: Apache-2.0
"""Small files that are always whole, on disks and in object stores.

Every file that is written at once (config.json, summary.json, state.json,
reports) goes through `write`, so that a kill or a full disk leaves the old text
or the new one. Metrics are appended, and checkpoints committed, elsewhere.
"""

import contextlib
import errno
import os
from typing import Any

from etils import epath

_FULL = (errno.ENOSPC, errno.EDQUOT)
# Libraries in C++ report it in words.
_FULL_WORDS = ("no space left on device", "disk quota exceeded")


def is_remote(path: epath.PathLike) -> bool:
  """Whether a path is in an object store rather than on a disk."""
  return "://" in str(path)


def write(path: epath.PathLike, text: str) -> None:
  """Replaces a file: whoever reads it finds the old or the new text.

  A file that already holds `text` is left alone.

  Raises:
    OSError: it cannot be written; what was there before still is.
  """
  path = epath.Path(path)
  data = text.encode("utf-8")
  with contextlib.suppress(OSError):
    if path.read_bytes() == data:
      return
  if is_remote(path):
    # Object stores write objects as a whole, or not at all.
    path.write_bytes(data)
    return
  temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
  try:
    with open(temporary, "wb") as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except OSError:
    temporary.unlink(missing_ok=True)
    raise


def is_disk_full(error: BaseException | None) -> bool:
  """Whether an exception, or what led to it, says that a disk is full."""
  seen: set[int] = set()
  while error is not None and id(error) not in seen:
    seen.add(id(error))
    number: Any = getattr(error, "errno", None)
    if number in _FULL or any(w in str(error).lower() for w in _FULL_WORDS):
      return True
    error = error.__cause__ or error.__context__
  return False
