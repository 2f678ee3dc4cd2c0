# SPDX-License-Identifier: Apache-2.0
"""Finding files, and copies of remote ones."""

import os
import pathlib

from etils import epath
import pytest

from attnres_jax import config as config_lib
from attnres_jax import files
from attnres_jax.data import paths


class TestListFiles:
  @pytest.fixture(autouse=True)
  def set_up(self, tmp_path):
    self.folder = tmp_path
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/d.bin", ".hidden/e.txt"):
      (self.folder / name).parent.mkdir(exist_ok=True)
      (self.folder / name).write_text(name)

  def _list(self, path, suffixes=()):
    path = str(self.folder / path)
    files = paths.list_files("data.path", path, suffixes)
    return paths.relative_names(path, files)

  def test_folders_are_searched_and_sorted(self):
    assert self._list("") == ["a.txt", "b.txt", "sub/c.txt", "sub/d.bin"]
    assert self._list("", (".bin",)) == ["sub/d.bin"]

  def test_globs_and_files_are_taken_as_they_are(self):
    assert self._list("*.txt", (".bin",)) == ["a.txt", "b.txt"]
    assert self._list("s*/*") == ["sub/c.txt", "sub/d.bin"]
    assert "sub/c.txt" in self._list("**/*.txt")
    assert self._list("sub/d.bin") == ["d.bin"]

  def test_a_relative_glob(self):
    with pytest.MonkeyPatch.context() as patch:
      patch.chdir(self.folder)
      files = paths.list_files("data.path", "*.txt")
    assert [os.fspath(file) for file in files] == ["a.txt", "b.txt"]

  def test_nothing_there(self):
    for path in ("missing", "*.parquet"):
      with pytest.raises(
        config_lib.ConfigError, match="config.data.path: .* glob with [*].bin"
      ):
        self._list(path, (".bin",))

  def test_local_files_are_used_in_place(self):
    path = epath.Path(self.folder / "a.txt")
    assert paths.local_file(path) == str(self.folder / "a.txt")


class TestCachedCopy:
  @pytest.fixture(autouse=True)
  def set_up(self, tmp_path):
    folder = tmp_path
    self.cache = folder / "cache"
    self.source = epath.Path(folder / "remote.bin")
    self.source.write_bytes(b"first")

  def test_copies_once_and_again_after_a_change(self):
    copy = paths.cached_copy(self.source, self.cache)
    assert copy.read_bytes() == b"first"
    copy.write_bytes(b"marked")
    again = paths.cached_copy(self.source, self.cache)
    assert again.read_bytes() == b"marked"
    self.source.write_bytes(b"second")
    changed = paths.cached_copy(self.source, self.cache)
    assert changed.read_bytes() == b"second"
    assert {p.name for p in self.cache.rglob("*.*")} == {"remote.bin"}

  def test_a_copy_cut_short_is_not_taken_for_the_file(self):
    def break_off(source, target, length):
      target.write(source.read(2))
      raise OSError("connection lost")

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(paths.shutil, "copyfileobj", break_off)
      with pytest.raises(OSError):
        paths.cached_copy(self.source, self.cache)
    copy = paths.cached_copy(self.source, self.cache)
    assert copy.read_bytes() == b"first"

  def test_remote_files_come_through_the_cache(self):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(files, "is_remote", lambda path: True)
      patch.setenv("ATTNRES_JAX_CACHE", str(self.cache))
      local = paths.local_file(self.source)
    assert local.startswith(str(self.cache))
    assert pathlib.Path(local).read_bytes() == b"first"
