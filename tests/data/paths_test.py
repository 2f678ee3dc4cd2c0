# SPDX-License-Identifier: Apache-2.0
"""Finding files, and copies of remote ones."""

import os
import pathlib
import types

from etils import epath
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import files
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
    return [f.name for f in paths.list_files("data.path", path, suffixes)]

  def test_folders_are_searched_and_sorted(self):
    assert self._list("") == ["a.txt", "b.txt", "sub/c.txt", "sub/d.bin"]
    assert self._list("", (".bin",)) == ["sub/d.bin"]

  def test_globs_and_files_are_taken_as_they_are(self):
    assert self._list("*.txt", (".bin",)) == ["a.txt", "b.txt"]
    assert self._list("s*/*") == ["sub/c.txt", "sub/d.bin"]
    assert "sub/c.txt" in self._list("**/*.txt")
    assert self._list("sub/d.bin") == ["d.bin"]

  def test_a_folder_whose_name_looks_like_a_glob(self):
    for name in ("run[1]/a.txt", "run[1]/b.txt", "run1/c.txt"):
      (self.folder / name).parent.mkdir(exist_ok=True)
      (self.folder / name).write_text(name)
    assert self._list("run[1]") == ["a.txt", "b.txt"]
    assert self._list("run[1]/b.txt") == ["b.txt"]
    assert self._list("run[1]/[b-z]*") == ["b.txt"]
    with pytest.raises(config_lib.ConfigError):
      self._list("run[2-9]")

  def test_a_relative_glob(self):
    with pytest.MonkeyPatch.context() as patch:
      patch.chdir(self.folder)
      files = paths.list_files("data.path", "*.txt")
    assert [os.fspath(file.path) for file in files] == ["a.txt", "b.txt"]

  def test_nothing_there(self):
    for path in ("missing", "*.parquet"):
      with pytest.raises(
        config_lib.ConfigError, match="config.data.path: .* glob with [*].bin"
      ):
        self._list(path, (".bin",))

  def test_local_files_are_used_in_place(self):
    path = epath.Path(self.folder / "a.txt")
    file = paths.File("data.path", "a.txt", path)
    assert file.local() == str(self.folder / "a.txt")

  def test_a_list(self):
    both = f"{self.folder / 'sub'},{self.folder / 'a.txt'}"
    listed = paths.list_files("data.path", both, (".txt",))
    assert [f.name for f in listed] == ["c.txt", "a.txt"]
    assert self._list("b.txt,") == ["b.txt"]
    (self.folder / "b,c.txt").write_text("")
    assert self._list("b,c.txt") == ["b,c.txt"]

  def test_a_file_that_never_ends(self):
    os.mkfifo(self.folder / "pipe.txt")
    assert "pipe.txt" not in self._list("")
    for path in ("/dev/zero", "/dev/null", str(self.folder / "pipe.txt")):
      with pytest.raises(
        config_lib.ConfigError, match=f"got '{path}', expected"
      ):
        paths.list_files("data.path", path)


class TestCachedCopy:
  @pytest.fixture(autouse=True)
  def set_up(self, tmp_path, monkeypatch):
    self.cache = tmp_path / "cache"
    monkeypatch.setattr(files, "is_remote", lambda path: True)
    monkeypatch.setenv("ATTNRES_JAX_CACHE", str(self.cache))
    source = epath.Path(tmp_path / "remote.bin")
    source.write_bytes(b"first")
    self.file = paths.File("data.path", "x", source)

  def _copy(self):
    return pathlib.Path(self.file.local())

  def test_copies_once_and_again_after_a_change(self):
    copy = self._copy()
    assert copy.read_bytes() == b"first" and self.cache in copy.parents
    copy.write_bytes(b"marked")
    assert self._copy().read_bytes() == b"marked"
    self.file.path.write_bytes(b"second")
    assert self._copy().read_bytes() == b"second"
    assert {p.name for p in self.cache.rglob("*.*")} == {"remote.bin"}

  def test_a_change_that_no_time_tells(self):
    """Objects of S3 have no modification time."""
    other = self.file.path.with_name("other")
    other.write_bytes(b"other")
    for path in (self.file.path, other):
      os.utime(path, (0, 0))
    assert self._copy().read_bytes() == b"first"
    os.replace(other, self.file.path)
    assert self._copy().read_bytes() == b"other"

  @pytest.mark.parametrize("version", ["generation", "ETag"])
  def test_an_object_in_another_class_is_the_same(self, version, monkeypatch):
    about = {"size": 5, version: "1", "storageClass": "STANDARD"}
    store = types.SimpleNamespace(info=lambda path: about)
    monkeypatch.setattr(paths.stores, "client", lambda path: store)
    copy = self._copy()
    about["storageClass"] = "NEARLINE"
    assert self._copy() == copy
    about[version] = "2"
    assert self._copy() != copy

  def test_a_full_disk_is_named_before_anything_is_copied(self, monkeypatch):
    monkeypatch.setattr(files, "_free_bytes", lambda path: 4)
    with pytest.raises(files.DiskFullError, match="5 bytes needed") as full:
      self._copy()
    assert pathlib.Path(full.value.filename).is_relative_to(self.cache)
    assert not self.cache.exists()

  def test_a_copy_cut_short_is_not_taken_for_the_file(self):
    def break_off(source, target, length):
      target.write(source.read(2))
      raise OSError("connection lost")

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(paths.shutil, "copyfileobj", break_off)
      with pytest.raises(OSError):
        self._copy()
    assert self._copy().read_bytes() == b"first"


class TestSplits:
  @pytest.fixture(autouse=True)
  def set_up(self, tmp_path):
    self.folder = tmp_path

  def _splits(self, *names, all_named=False, **fields):
    for name in names:
      (self.folder / name).parent.mkdir(exist_ok=True)
      (self.folder / name).write_text(name)
    fields = {"path": str(self.folder)} | {
      name: str(self.folder / path) for name, path in fields.items()
    }
    config = config_lib.DataConfig(source="jsonl", **fields)
    splits, shared = paths.splits(config, (".x",), all_named=all_named)
    train, held_out = ([f.name for f in splits[s]] for s in splits)
    assert shared == (train == held_out)
    return train, held_out

  @pytest.mark.parametrize(
    "train,held_out",
    [
      ("fineweb_train_000001.x", "fineweb_val_000000.x"),
      ("train.x", "val.x"),
      ("train-00000-of-00014.x", "validation-00000-of-00001.x"),
      ("x.Train.x", "VALID.x"),
      ("train/0.x", "test/0.x"),
      ("evaluated.x", "valid.x"),
      ("test/train.x", "train/val.x"),
      # Words that only contain the names of splits.
      ("interval.x", "val.x"),
      ("latest.x", "test2.x"),
      ("retrain.x", "val_2.x"),
    ],
  )
  def test_whole_words_decide(self, train, held_out):
    assert self._splits(train, held_out) == ([train], [held_out])

  @pytest.mark.parametrize(
    "names",
    [
      ("a.x", "b.x"),
      ("interval.x", "latest.x", "eval.x", "medieval.x", "trainval.x"),
      ("train-0.x", "train-1.x"),
      ("val.x",),
    ],
  )
  def test_nothing_to_decide(self, names):
    assert self._splits(*names) == (sorted(names),) * 2

  def test_files_named_test_are_held_out_of_both(self):
    names = "test.x", "train.x", "val.x"
    assert self._splits(*names) == (["train.x"], ["val.x"])

  def test_a_folder_in_which_some_texts_have_such_names(self):
    names = ["model.x", "test/model_test.x", "train.x", "train_test_split.x"]
    assert self._splits(*names, all_named=True) == (names, names)

  def test_a_text_whose_name_says_both_splits(self):
    names = ["train/train_test_split.x", "val/a.x"]
    assert self._splits(*names, all_named=True) == (names[:1], names[1:])

  def test_two_splits_in_one_name(self):
    with pytest.raises(
      config_lib.ConfigError, match="'.*train_val.x', .*not train and valid"
    ):
      self._splits("train_val.x")

  def test_a_path_of_its_own(self):
    names = "a.x", "b.x", "train.x", "val.x"
    assert self._splits(*names, path="a.x", validation_path="b.x") == (
      ["a.x"],
      ["b.x"],
    )
    # A folder with both is read as if it were alone.
    train = ["a.x", "b.x", "train.x"]
    assert self._splits(*names, validation_path="") == (train, ["val.x"])

  @pytest.mark.parametrize("name", ["a.x", "*.x", "b.x,a.x", "link.x"])
  def test_a_file_in_both(self, name):
    (self.folder / "link.x").symlink_to(self.folder / "a.x")
    both = name.replace(",", f",{self.folder}/")
    with pytest.raises(
      config_lib.ConfigError, match="validation_path.*not also one to train on"
    ):
      self._splits("a.x", "b.x", "c.x", path="a.x", validation_path=both)


def test_names_that_are_not_utf_8(tmp_path):
  (tmp_path / "good.txt").touch()
  name = os.fsencode(tmp_path) + b"/b\xff.txt"
  try:
    open(name, "wb").close()
  except OSError:  # Some file systems refuse it, too.
    pytest.skip("the file system has no such names")
  with pytest.raises(config_lib.ConfigError, match="names are UTF-8") as error:
    paths.list_files("data.path", str(tmp_path))
  str(error.value).encode()
