# SPDX-License-Identifier: Apache-2.0
"""Small files are replaced completely or not at all."""

import errno
import os
import pathlib
import re
import tempfile

from hypothesis import given
from hypothesis import strategies as st
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import exits
from attnres_jax.common import files
from attnres_jax.common import stores


def test_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
  files.write(tmp_path / "file", "old")
  temporary = tmp_path / "file.tmp"
  temporary.symlink_to("/dev/full")
  monkeypatch.setattr(stores, "temporary_of", lambda path: str(temporary))
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


@given(st.text("ab[]*?!-", min_size=1, max_size=5))
def test_only_patterns_have_wildcards(name):
  """A file is found below its folder, whatever the folder is called."""
  with tempfile.TemporaryDirectory() as parent:
    for folder in {name, "a", "b"} - {"."}:
      (pathlib.Path(parent) / folder / "deep").mkdir(parents=True)
      (pathlib.Path(parent) / folder / "deep" / f"{folder}.txt").touch()
    root = pathlib.Path(parent) / name
    assert files.glob(root, "**/*.txt") == [f"deep/{name}.txt"]
    assert files.glob(root, "*/*") == [f"deep/{name}.txt"]
    assert files.glob(root, "*") == []


def test_a_bucket_has_no_folder_with_wildcards():
  for scheme in ("gs", "s3"):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(files, "check_path", lambda name, path, _: path)
      with pytest.raises(config_lib.ConfigError, match="^--workdir: got"):
        files.check_folder("--workdir", f"{scheme}://bucket/run[1]")
      files.check_folder("--workdir", f"{scheme}://bucket/run-1")


def test_a_file_with_the_same_text_is_not_written_again(tmp_path):
  files.write(tmp_path / "file", "text")
  before = (tmp_path / "file").stat()
  files.write(tmp_path / "file", "text")
  after = (tmp_path / "file").stat()
  assert (before.st_ino, before.st_mtime_ns) == (
    after.st_ino,
    after.st_mtime_ns,
  )


class TestName:
  """Names in a file of another person stay in its folder, or are refused."""

  @given(st.text() | st.text(alphabet="./\\~a\0\n\x1b", max_size=6))
  def test_a_name_stays_in_its_folder(self, value):
    if files.is_name(value):
      folder = pathlib.Path("/folder/of/it")
      path = pathlib.Path(os.path.normpath(folder / value))
      assert value.isprintable() and "\\" not in value
      assert path.name == value and path.parent == folder

  def test_accepts(self):
    for name in ("a", "model-00001-of-00002.safetensors", "ein Name.json", "é"):
      assert files.is_name(name)
    assert not any(map(files.is_name, ("a/b", "..", "", 3, [], None)))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="not Linux")
def test_an_endless_file_is_empty(tmp_path):
  (tmp_path / "file").symlink_to("/dev/full")
  assert files.read(tmp_path / "file") == b""
  assert files.read(tmp_path / "file", -10) == b""
  (tmp_path / "other").write_bytes(b"0123456789")
  ends = [
    files.read(tmp_path / "other", start) for start in (0, 7, 12, -3, -99)
  ]
  assert ends == [b"0123456789", b"789", b"", b"789", b"0123456789"]


def test_commands_that_read_need_no_write_access(tmp_path, monkeypatch):
  # As if by another user; root may write anywhere.
  monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
  folder = files.check_folder("--workdir", str(tmp_path), writable=False)
  assert str(folder) == str(tmp_path)
  with pytest.raises(config_lib.ConfigError, match="write access to"):
    files.check_folder("--workdir", str(tmp_path))
  monkeypatch.setattr(os, "access", lambda path, mode: False)
  with pytest.raises(config_lib.ConfigError, match="read access to"):
    files.check_folder("--workdir", str(tmp_path), writable=False)


@pytest.mark.parametrize(
  "path", ["gs://", "gs:///x", "s3://", "az://", "ftp://a/b", "", "a\0b"]
)
def test_a_path_that_cannot_be_looked_up(path):
  for check in files.check_path, lambda *of: files.check_output(*of, ("x",)):
    with pytest.raises(config_lib.ConfigError, match="^--out: got") as error:
      check("--out", path)
    assert "\n" not in str(error.value)


def test_links_in_a_circle_and_folders_in_place_of_files(tmp_path):
  (tmp_path / "loop").symlink_to("loop")
  for check in files.check_path, files.check_folder:
    with pytest.raises(config_lib.ConfigError, match="symbolic links"):
      check("--out", str(tmp_path / "loop"))
  for name in ("loop", "loop/x", "."):
    with pytest.raises(config_lib.ConfigError, match="^--out: got"):
      files.check_output("--out", tmp_path / name, ("x",))
  # A link that leads nowhere yet can be written through.
  (tmp_path / "link").symlink_to("new")
  files.write_output("--out", tmp_path / "link", "x", ("x",))


@pytest.mark.parametrize(
  "number", [errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG]
)
def test_what_is_wrong_with_a_path_is_not_tried_again(number):
  assert exits.of_error(OSError(number, "wrong")) == exits.Exit.NEVER
  assert exits.of_error(OSError(errno.EIO, "away")) == exits.Exit.AGAIN
