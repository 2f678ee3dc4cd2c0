# SPDX-License-Identifier: Apache-2.0
"""Small files are replaced completely or not at all."""

import errno
import os
import pathlib
import re

import pytest

from attnres_jax import files


def test_full_disk_leaves_the_old_file(tmp_path):
  files.write(tmp_path / "file", "old")
  temporary = tmp_path / f"file.{os.getpid()}.tmp"
  temporary.symlink_to("/dev/full")
  with pytest.raises(OSError) as caught:
    files.write(tmp_path / "file", "new")
  assert caught.value.errno == errno.ENOSPC
  assert caught.value.filename == str(tmp_path / "file")
  sizes = r"^no space left on device: 3 bytes needed, [\d,]+ free; free some"
  assert re.match(sizes, caught.value.strerror)
  assert files.is_disk_full(caught.value)
  assert (tmp_path / "file").read_text() == "old"
  assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_counts_as_a_full_disk():
  wrapped = RuntimeError("save failed")
  wrapped.__cause__ = ValueError("write: No space left on device [x]")
  assert files.is_disk_full(wrapped)
  assert files.is_disk_full(OSError(errno.EDQUOT, "over quota"))
  assert not files.is_disk_full(FileNotFoundError(errno.ENOENT, "no file"))
  assert not files.is_disk_full(None)
  assert files.is_remote("gs://bucket/x")
  assert not files.is_remote(pathlib.Path("/x"))


def test_a_file_with_the_same_text_is_not_written_again(tmp_path):
  files.write(tmp_path / "file", "text")
  before = (tmp_path / "file").stat()
  files.write(tmp_path / "file", "text")
  after = (tmp_path / "file").stat()
  assert (before.st_ino, before.st_mtime_ns) == (
    after.st_ino,
    after.st_mtime_ns,
  )
