# SPDX-License-Identifier: Apache-2.0
"""Finding and opening data files, local or in a bucket.

Paths go through etils.epath, so `gs://` works if the matching client is
installed. Libraries that read files need a local name, and so does random
access, so a remote file is first copied completely into a cache folder:
`$ATTNRES_JAX_CACHE`, or `~/.cache/attnres_jax`.
"""

from collections.abc import Iterator, Sequence
import glob
import hashlib
import os
import pathlib
import shutil
from typing import NoReturn

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax import files as files_lib


def list_files(
  field: str, path: str, suffixes: Sequence[str] = ()
) -> list[epath.Path]:
  """Files named by `path` (a file, a folder or a glob), sorted.

  Args:
    field: of the configuration, for the error.
    path: a file; a folder, searched recursively; or a glob, on local disks with
      `**` for any folders. Hidden files and folders are left out.
    suffixes: accepted suffixes inside a folder; empty for every file. A file or
      glob is used as it is.

  Raises:
    ConfigError: there are no such files.
  """
  root = files_lib.check_path(f"config.{field}", path)
  if glob.has_magic(path):
    files = [p for p in _glob(field, root) if p.is_file()]
  elif root.is_file():
    files = [root]
  elif root.is_dir():
    files = [p for p in _walk(root) if _ends_with(p, suffixes)]
  else:
    files = []
  if not files:
    kind = " or ".join(f"*{s}" for s in suffixes) or "files"
    config_lib.fail(field, path, f"a file, or a folder or glob with {kind}")
  return sorted(files)


def relative_names(path: str, files: Sequence[epath.Path]) -> list[str]:
  """Names of `files` relative to the folder of `path`."""
  root = epath.Path(path).expanduser()
  if glob.has_magic(path):
    root = _split_glob(root)[0]
  elif root.is_file():
    root = root.parent
  return [file.relative_to(root).as_posix() for file in files]


def local_file(path: epath.Path) -> str:
  """A local file with the content of `path`: itself or a cached copy."""
  name = os.fspath(path)
  if not files_lib.is_remote(path):
    return name
  folder = os.environ.get("ATTNRES_JAX_CACHE")
  folder = pathlib.Path(folder or "~/.cache/attnres_jax").expanduser()
  return str(cached_copy(path, folder))


def cached_copy(path: epath.Path, folder: pathlib.Path) -> pathlib.Path:
  """Copies `path` into `folder` unless a copy of this version exists.

  A version is identified by address, length and modification time. The copy
  gets its final name only when it is complete.
  """
  stat = path.stat()
  version = f"{os.fspath(path)} {stat.length} {stat.mtime}"
  key = hashlib.sha256(version.encode()).hexdigest()[:16]
  copy = folder / key / path.name
  if not copy.exists():
    copy.parent.mkdir(parents=True, exist_ok=True)
    partial = copy.with_name(f"{copy.name}.{os.getpid()}.tmp")
    with path.open("rb") as source, partial.open("wb") as target:
      shutil.copyfileobj(source, target, length=1 << 24)
    partial.replace(copy)
  return copy


def needs_extra(field: str, value: str, package: str, extra: str) -> NoReturn:
  """Raises the error of a value whose optional package is not installed."""
  raise ImportError(
    f"config.data.{field}={value!r} needs the package {package!r}:"
    f' pip install "attnres-jax[{extra}]"'
  )


def _split_glob(root: epath.Path) -> tuple[epath.Path, str]:
  parts = root.parts
  first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
  base = epath.Path(*parts[:first]) if first else epath.Path(".")
  return base, "/".join(parts[first:])


def _glob(field: str, root: epath.Path) -> Iterator[epath.Path]:
  base, pattern = _split_glob(root)
  if files_lib.is_remote(base):
    if "**" in pattern:
      config_lib.fail(
        field, os.fspath(root), "a folder or a glob without ** in a bucket"
      )
    yield from base.glob(pattern)
  else:  # epath does not support `**`, not even here.
    yield from map(epath.Path, pathlib.Path(base).glob(pattern))


def _walk(root: epath.Path) -> Iterator[epath.Path]:
  for path in root.iterdir():
    if not path.name.startswith("."):
      if path.is_dir():
        yield from _walk(path)
      else:
        yield path


def _ends_with(path: epath.Path, suffixes: Sequence[str]) -> bool:
  return not suffixes or path.name.endswith(tuple(suffixes))
