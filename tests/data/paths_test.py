# SPDX-License-Identifier: Apache-2.0
"""Finding files, and copies of remote ones."""

import os
import pathlib
import tempfile

from absl.testing import absltest
from etils import epath
import pytest

from attnres_jax import config as config_lib
from attnres_jax import files
from attnres_jax.data import paths


class ListFilesTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/d.bin", ".hidden/e.txt"):
      (self.folder / name).parent.mkdir(exist_ok=True)
      (self.folder / name).write_text(name)

  def _list(self, path, suffixes=()):
    path = str(self.folder / path)
    files = paths.list_files("data.path", path, suffixes)
    return paths.relative_names(path, files)

  def test_folders_are_searched_and_sorted(self):
    self.assertEqual(
      self._list(""), ["a.txt", "b.txt", "sub/c.txt", "sub/d.bin"]
    )
    self.assertEqual(self._list("", (".bin",)), ["sub/d.bin"])

  def test_globs_and_files_are_taken_as_they_are(self):
    self.assertEqual(self._list("*.txt", (".bin",)), ["a.txt", "b.txt"])
    self.assertEqual(self._list("s*/*"), ["sub/c.txt", "sub/d.bin"])
    self.assertIn("sub/c.txt", self._list("**/*.txt"))
    self.assertEqual(self._list("sub/d.bin"), ["d.bin"])

  def test_a_relative_glob(self):
    with pytest.MonkeyPatch.context() as patch:
      patch.chdir(self.folder)
      files = paths.list_files("data.path", "*.txt")
    self.assertEqual([os.fspath(file) for file in files], ["a.txt", "b.txt"])

  def test_nothing_there(self):
    for path in ("missing", "*.parquet"):
      with self.assertRaisesRegex(
        config_lib.ConfigError, "config.data.path: .* glob with [*].bin"
      ):
        self._list(path, (".bin",))

  def test_local_files_are_used_in_place(self):
    path = epath.Path(self.folder / "a.txt")
    self.assertEqual(paths.local_file(path), str(self.folder / "a.txt"))


class CachedCopyTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.cache = folder / "cache"
    self.source = epath.Path(folder / "remote.bin")
    self.source.write_bytes(b"first")

  def test_copies_once_and_again_after_a_change(self):
    copy = paths.cached_copy(self.source, self.cache)
    self.assertEqual(copy.read_bytes(), b"first")
    copy.write_bytes(b"marked")
    again = paths.cached_copy(self.source, self.cache)
    self.assertEqual(again.read_bytes(), b"marked")
    self.source.write_bytes(b"second")
    changed = paths.cached_copy(self.source, self.cache)
    self.assertEqual(changed.read_bytes(), b"second")
    self.assertEqual({p.name for p in self.cache.rglob("*.*")}, {"remote.bin"})

  def test_a_copy_cut_short_is_not_taken_for_the_file(self):
    def break_off(source, target, length):
      target.write(source.read(2))
      raise OSError("connection lost")

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(paths.shutil, "copyfileobj", break_off)
      with self.assertRaises(OSError):
        paths.cached_copy(self.source, self.cache)
    copy = paths.cached_copy(self.source, self.cache)
    self.assertEqual(copy.read_bytes(), b"first")

  def test_remote_files_come_through_the_cache(self):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(files, "is_remote", lambda path: True)
      patch.setenv("ATTNRES_JAX_CACHE", str(self.cache))
      local = paths.local_file(self.source)
    self.assertTrue(local.startswith(str(self.cache)))
    self.assertEqual(pathlib.Path(local).read_bytes(), b"first")


if __name__ == "__main__":
  absltest.main()
