# SPDX-License-Identifier: Apache-2.0
"""Object stores (gs://, s3://): requests that are never answered from a cache.

fsspec's clients remember listings and sizes. Several hosts write to the folder
of a sweep, so here nothing is remembered. The clients raise what they like;
here an error is an OSError with the path, or an AccessError if trying again is
useless.
"""

from collections.abc import Callable, Iterator
import contextlib
import os
from typing import Any
import uuid

from etils import epath
import fsspec

from attnres_jax import config as config_lib

for _scheme in ("gcs", "s3"):
  fsspec.config.conf.setdefault(_scheme, {})["use_listings_cache"] = False

# What the claim of a folder has to confirm before anything is written there.
_guards: dict[str, Callable[[], None]] = {}
_REFUSED_WORDS = (
  "forbidden", "access denied", "accessdenied", "permission", "credentials",
  "bucket does not exist", "nosuchbucket", "bucket not found",
)  # fmt: skip


class AccessError(config_lib.ConfigError):
  """A store refuses access: no bucket, no credentials or no permission."""


def is_remote(path: epath.PathLike) -> bool:
  """Whether a path is in an object store rather than on a disk."""
  return "://" in str(path)


def client(path: epath.PathLike) -> Any:
  """The fsspec client of a path.

  Raises:
    ConfigError: its package is not installed.
  """
  scheme = str(path).partition("://")[0] if is_remote(path) else "file"
  try:
    return fsspec.filesystem(scheme)
  except (ImportError, ValueError) as error:
    extra = {"gs": "gcs", "s3": "s3"}.get(scheme, scheme)
    raise config_lib.ConfigError(
      f"{path}: {error}; pip install 'attnres-jax[{extra}]'"
    ) from error


@contextlib.contextmanager
def reaching(path: epath.PathLike) -> Iterator[None]:
  """A context that says of any failure of a store whether to try again.

  Raises:
    AccessError: no bucket, no credentials, or no permission.
    OSError: the store cannot be reached or is not available. FileNotFoundError
      and FileExistsError pass.
  """
  try:
    yield
  except (FileNotFoundError, FileExistsError, config_lib.ConfigError):
    raise
  except Exception as error:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, PermissionError) or any(
      word in text.lower() for word in _REFUSED_WORDS
    ):
      raise AccessError(
        f"{path}: the store refuses access ({text}); see docs/launch.md,"
        " Before you launch"
      ) from error
    raise OSError(f"{path}: the store fails ({text})") from error


def temporary_of(path: epath.PathLike) -> str:
  """A name beside a file that no other writer has, on any host."""
  return f"{os.fspath(path)}.{uuid.uuid4().hex[:12]}.tmp"


def create(path: epath.PathLike, data: bytes) -> bool:
  """Writes a new object; False if there is one. One of several writers wins.

  A request that the client repeated, because the answer to the first was lost,
  finds its own object: then the content decides.
  """
  store = client(path)
  with reaching(path):
    try:
      if is_remote(path):
        store.pipe_file(str(path), data, mode="create")
      else:  # A network disk without locks.
        temporary = temporary_of(path)
        store.pipe_file(temporary, data)
        os.link(temporary, path)
        os.unlink(temporary)
      return True
    except FileExistsError:
      with contextlib.suppress(FileNotFoundError):
        return store.cat_file(str(path)) == data
      return False


def write(path: epath.PathLike, data: bytes) -> None:
  """Writes or replaces an object, completely or not at all."""
  for folder, confirm in list(_guards.items()):
    if str(path).startswith(f"{folder}/"):
      confirm()
  with reaching(path):
    if is_remote(path):
      client(path).pipe_file(str(path), data)
    else:  # A lease on a disk without locks, which only its holder writes.
      client(path).pipe_file(f"{path}.tmp", data)
      os.replace(f"{path}.tmp", path)


def guard(folder: epath.PathLike, confirm: Callable[[], None] | None) -> None:
  """Makes every write into a folder confirm first; None ends that."""
  if confirm is None:
    _guards.pop(str(folder), None)
  else:
    _guards[str(folder)] = confirm


def read(path: epath.PathLike, start: int = 0) -> bytes:
  """The bytes of an object from `start`, which may be negative: the last ones.

  Raises:
    FileNotFoundError: there is none.
  """
  with reaching(path):
    if start < 0:
      start = max(0, client(path).info(str(path))["size"] + start)
    # Servers refuse any range of an empty object.
    return client(path).cat_file(str(path), start=start or None)


def names(folder: epath.PathLike) -> list[str]:
  """Names of the files and folders in a folder; [] if there is none."""
  with reaching(folder):
    try:
      paths = client(folder).ls(str(folder), detail=False)
    except FileNotFoundError:
      return []
  return sorted({path.rstrip("/").rpartition("/")[2] for path in paths} - {""})


def remove(path: epath.PathLike) -> None:
  """Removes an object, if there is one."""
  with reaching(path), contextlib.suppress(FileNotFoundError):
    client(path).rm_file(str(path))
