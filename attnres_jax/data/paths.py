# SPDX-License-Identifier: Apache-2.0
"""Data files: which belong to a split, and how one is read.

Paths go through etils.epath, so `gs://` and `s3://` work if the client is
installed. A file whose name ends in .gz or .zst is decompressed while it is
read. Libraries that need a local name, and random access, read a remote file
from a complete copy in `$ATTNRES_JAX_CACHE`, or `~/.cache/attnres_jax`.

Whole words of a file's name say which split it belongs to: `train`; `val`,
`valid` or `validation`; `test`. The words nearest to the end of the path count,
so that `test/train.bin` is a training file. Files named `test` stand in for
validation if no file is named for it, and are left out otherwise. Files that
`data.validation_path` names are in no other split.
"""

from collections.abc import Iterator, Sequence
import contextlib
import glob
import gzip
import hashlib
import importlib
import io
import os
import pathlib
import re
import shutil
from typing import Any, NamedTuple, NoReturn

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax.common import files as files_lib
from attnres_jax.common import stores
from attnres_jax.config import fields
from attnres_jax.data import documents

COMPRESSED = (".gz", ".zst")
_TEST = "test"
_WORDS = {"train": documents.TRAIN, _TEST: _TEST} | dict.fromkeys(
  ("val", "valid", "validation"), documents.VALIDATION
)


class File(NamedTuple):
  """A data file.

  Attributes:
    field: of the configuration that names it, for errors.
    name: relative to the folder that the field names.
    path: where it is.
  """

  field: str
  name: str
  path: epath.Path

  def fail(self, accepted: str, where: object = "") -> NoReturn:
    """Raises the one-line error of a file, or of a place inside of it."""
    config_lib.fail(self.field, f"{os.fspath(self.path)}{where}", accepted)

  @contextlib.contextmanager
  def reading(self, kind: str) -> Iterator[None]:
    """A context in which any error of a library names this file.

    `kind` is what can be read, such as "a Parquet file".
    """
    try:
      yield
    except (config_lib.ConfigError, ImportError):
      raise
    except Exception as error:  # Libraries raise whatever they like.
      reason = " ".join(str(error).split())[:200] or type(error).__name__
      self.fail(f"{kind} that is whole ({reason})")

  @contextlib.contextmanager
  def open(self) -> Iterator[Any]:
    """A context with the content, decompressed, as a binary file."""
    if self.name.endswith(COMPRESSED) and not self.path.stat().length:
      self.fail("a compressed file (this one is empty)")
    with self.path.open("rb") as file:
      if self.name.endswith(".gz"):
        with gzip.GzipFile(fileobj=file) as content:
          yield content
      elif self.name.endswith(".zst"):
        pyarrow = library("pyarrow", self.field, os.fspath(self.path))
        # Unlike other readers, this one reads all frames of a file.
        stream: Any = pyarrow.CompressedInputStream(file, "zstd")
        with io.BufferedReader(stream) as content:
          yield content
      else:
        yield file

  def local(self) -> str:
    """The name of a local file with this content: itself or a cached copy.

    A copy is of one version: address, and what Google's stores or S3 say of the
    content. It gets its name when it is complete.

    Raises:
      DiskFullError: the disk of the copies has too little space.
    """
    if not files_lib.is_remote(self.path):
      return os.fspath(self.path)
    folder = os.environ.get("ATTNRES_JAX_CACHE") or "~/.cache/attnres_jax"
    with stores.reaching(self.path):
      about = stores.client(self.path).info(os.fspath(self.path))
    # Not the rest: Autoclass changes the class of what is read or is not.
    revision = about.get("generation") or about.get("ETag") or about
    version = f"{os.fspath(self.path)} {revision}"
    key = hashlib.sha256(version.encode()).hexdigest()[:16]
    copy = pathlib.Path(folder).expanduser() / key / self.path.name
    if not copy.exists():
      files_lib.check_space(copy, about["size"])
      copy.parent.mkdir(parents=True, exist_ok=True)
      partial = pathlib.Path(stores.temporary_of(copy))
      with self.path.open("rb") as source, partial.open("wb") as target:
        shutil.copyfileobj(source, target, length=1 << 24)
      partial.replace(copy)
    return str(copy)


def splits(
  config: config_lib.DataConfig,
  suffixes: Sequence[str] = (),
  *,
  all_named: bool = False,
) -> tuple[dict[str, list[File]], bool]:
  """The files of each split.

  Args:
    config: with the paths.
    suffixes: accepted in folders; see `list_files`.
    all_named: whether names decide only if each says a split, as they hardly do
      where every file is a document. Otherwise, other files are for training.

  Returns:
    The files, and whether both splits have the same ones, so that something
    else has to divide what they hold.

  Raises:
    ConfigError: there are no files, or one is in both splits.
  """
  train = list_files("data.path", config.path, suffixes)
  held_out = train
  if config.validation_path:
    field = "data.validation_path"
    held_out = list_files(field, config.validation_path, suffixes)
  files = {
    documents.TRAIN: _named(train, documents.TRAIN, all_named),
    documents.VALIDATION: _named(held_out, documents.VALIDATION, all_named),
  }
  if not config.validation_path and files[documents.VALIDATION] == train:
    return files, True
  others = {_real(file.path) for file in files[documents.TRAIN]}
  for file in files[documents.VALIDATION]:
    if _real(file.path) in others:
      file.fail("a file that is not also one to train on")
  return files, False


def list_files(
  field: str, path: str, suffixes: Sequence[str] = ()
) -> list[File]:
  """The files that a path names, in a fixed order, each once.

  Args:
    field: of the configuration, for the error.
    path: a file; a folder, searched recursively; a glob, with `**` for any
      folders; or several of them, with commas between. Hidden files and folders
      are left out.
    suffixes: accepted suffixes inside a folder, before that of a compressed
      file; empty for every file. A file or glob is used unchanged.

  Raises:
    ConfigError: there are no such files.
  """
  each = [path]
  if "," in path and not files_lib.check_path(f"config.{field}", path).exists():
    each = [entry for entry in path.split(",") if entry]
  return list(
    {
      os.fspath(file.path): file
      for entry in each
      for file in _list(field, entry, suffixes)
    }.values()
  )


def library(name: str, field: str, value: str, extra: str = "data") -> Any:
  """The module of an optional package, which a value of a field needs.

  Raises:
    ImportError: it is not installed; says what to install.
  """
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ImportError(
      f"config.{field}={value!r} needs the package {name!r}:"
      f' pip install "attnres-jax[{extra}]"'
    ) from error


def _list(field: str, path: str, suffixes: Sequence[str]) -> list[File]:
  root, names = files_lib.check_path(f"config.{field}", path), []
  if files_lib.is_file(root):
    root, names = root.parent, [root.name]
  elif root.is_dir():
    ends = tuple(s + c for s in suffixes or [""] for c in ("", *COMPRESSED))
    names = files_lib.glob(root, "**/*")
    names = [name for name in names if name.endswith(ends)]
  elif glob.has_magic(path):
    # A folder may have brackets in its name.
    first = next(
      i
      for i, part in enumerate(root.parts)
      if glob.has_magic(part) and not epath.Path(*root.parts[: i + 1]).exists()
    )
    pattern = "/".join(root.parts[first:])
    root = epath.Path(*root.parts[:first] or ["."])
    names = files_lib.glob(root, pattern)
  if not names:
    kind = " or ".join(f"*{s}" for s in suffixes) or "files"
    config_lib.fail(field, path, f"a file, or a folder or glob with {kind}")
  files = [File(field, name, root / name) for name in sorted(names)]
  for file in files:
    if not fields.is_unicode(file.name):  # It says which split a text is in.
      file.fail("files whose names are UTF-8")
  return files


def _named(files: list[File], split: str, all_named: bool) -> list[File]:
  """The files that names assign to a split; all if names do not decide."""
  names = [_split_of_name(file, all_named) for file in files]
  held_out = documents.VALIDATION
  if held_out not in names:
    held_out = _TEST
  decide = held_out in names and set(names) - {documents.VALIDATION, _TEST}
  if not decide or (all_named and None in names):
    return files
  splits_taken = {held_out} if split == documents.VALIDATION else {split, None}
  return [file for file, name in zip(files, names) if name in splits_taken]


def _split_of_name(file: File, all_named: bool) -> str | None:
  """The split that the words of a name say, if any.

  Raises:
    ConfigError: they say several, where some names decide.
  """
  for part in reversed(file.name.split("/")):
    words = re.findall(r"[^\W\d_]+", part.lower())
    labels = {_WORDS[word] for word in words if word in _WORDS}
    if len(labels) > 1:
      if all_named:
        continue  # A document, such as train_test_split.py.
      file.fail(
        f"a name that says one split, not {' and '.join(sorted(labels))}"
      )
    if labels:
      return labels.pop()
  return None


def _real(path: epath.Path) -> str:
  name = os.fspath(path)
  return name if files_lib.is_remote(path) else os.path.realpath(name)
