# SPDX-License-Identifier: Apache-2.0
"""Every text source yields the same documents from the same texts."""

import json

import pytest

from attnres_jax import config as config_lib
from attnres_jax.data import sources
from attnres_jax.data import text as text_lib

_TEXTS = tuple(f"text {i}: " + "héllo\n\n" * i for i in range(23))


def _config(source, path, **fields):
  return config_lib.DataConfig(source=source, path=str(path), **fields)


def _open(source, path, **fields):
  return sources.open_splits(_config(source, path, **fields))["train"].documents


def _write_text(folder):
  for i, text in enumerate(_TEXTS):
    path = folder / f"part{i // 10}" / f"{i:03d}.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode())


def _write_jsonl(folder):
  for name, texts in (("a", _TEXTS[:9]), ("b", _TEXTS[9:])):
    lines = [json.dumps({"text": text, "n": len(text)}) for text in texts]
    (folder / f"{name}.jsonl").write_text("\n\n".join(lines) + "\n")


def write_parquet(path, texts):
  pyarrow = pytest.importorskip("pyarrow")
  parquet = pytest.importorskip("pyarrow.parquet")
  table = pyarrow.table({"n": list(range(len(texts))), "text": texts})
  parquet.write_table(table, path, row_group_size=4)


def _write_parquet(folder):
  write_parquet(folder / "a.parquet", _TEXTS[:9])
  write_parquet(folder / "b.parquet", _TEXTS[9:])


_WRITERS = {
  "text": _write_text, "jsonl": _write_jsonl, "parquet": _write_parquet,
}  # fmt: skip


class TestTextSources:
  @pytest.fixture(autouse=True)
  def set_up(self, tmp_path):
    self.folder = tmp_path

  @pytest.mark.parametrize("source", _WRITERS)
  def test_iterates_from_any_document(self, source, monkeypatch):
    # Several reads per row group of 4 and per file.
    monkeypatch.setattr(text_lib, "_RECORDS_AT_ONCE", 2)
    _WRITERS[source](self.folder)
    opened = _open(source, self.folder)
    everything = list(opened.iterate())
    assert [d.text.decode() for d in everything] == list(_TEXTS)
    json.dumps(opened.describe())
    for start in range(len(_TEXTS) + 1):
      assert list(opened.iterate(start)) == everything[start:]

  @pytest.mark.parametrize("source", ["jsonl", "parquet"])
  def test_records_are_split_by_their_text_alone(self, source):
    _WRITERS[source](self.folder)
    keys = {d.text: d.key for d in _open(source, self.folder).iterate()}
    _write_jsonl(self.folder)
    reference = {d.text: d.key for d in _open("jsonl", self.folder).iterate()}
    assert keys == reference

  def test_files_are_split_by_their_relative_path(self):
    _write_text(self.folder)
    keys = [d.key for d in _open("text", self.folder).iterate()]
    assert keys[:2] == ["part0/000.txt", "part0/001.txt"]
    pattern = f"{self.folder}/**/*.txt"
    assert [d.key for d in _open("text", pattern).iterate()] == keys

  @pytest.mark.parametrize("source", _WRITERS)
  def test_description_tells_changed_files_apart(self, source):
    _WRITERS[source](self.folder)
    before = _open(source, self.folder).describe()
    assert before == _open(source, self.folder).describe()
    sorted(p for p in self.folder.rglob("*") if p.is_file())[0].unlink()
    assert before != _open(source, self.folder).describe()

  def test_text_that_is_not_utf8_is_named(self):
    (self.folder / "a.txt").write_bytes(b"ok")
    (self.folder / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(config_lib.ConfigError, match="b.txt.*UTF-8"):
      list(_open("text", self.folder).iterate())

  @pytest.mark.parametrize(
    "content,message",
    [
      ('{"text": "a"}\n{"text": \n', r"data.jsonl:2.*a line of JSON"),
      ('{"body": "a"}\n', r"data.text_field: got 'text'.*has body"),
      ("[1]\n", r"data.text_field: got 'text'.*has no object"),
      ('{"text": 3}\n', r"data.jsonl:1.*text in 'text'"),
    ],
  )
  def test_bad_lines_are_named(self, content, message):
    (self.folder / "data.jsonl").write_text(content)
    opened = _open("jsonl", self.folder)
    with pytest.raises(config_lib.ConfigError, match=message):
      list(opened.iterate())

  def test_half_a_surrogate_pair_becomes_a_question_mark(self):
    (self.folder / "data.jsonl").write_text(r'{"text": "a\ud800b"}')
    (document,) = _open("jsonl", self.folder).iterate()
    assert document.text == b"a?b"

  def test_parquet_columns_are_named(self):
    _write_parquet(self.folder)
    with pytest.raises(
      config_lib.ConfigError, match="text_field: got 'body'.*one of n, text"
    ):
      list(_open("parquet", self.folder, text_field="body").iterate())
    with pytest.raises(config_lib.ConfigError, match="column of strings"):
      list(_open("parquet", self.folder, text_field="n").iterate())

  @pytest.mark.parametrize("source", ["jsonl", "parquet"])
  def test_a_text_that_is_null_is_refused_in_every_format(self, source):
    texts = ["a", None, "b"]
    path = self.folder / f"data.{source}"
    if source == "jsonl":
      path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    else:
      write_parquet(path, texts)
    place = {"jsonl": ":2", "parquet": ", row 1"}[source]
    with pytest.raises(
      config_lib.ConfigError, match=f"{place}', expected .* not null"
    ):
      list(_open(source, self.folder).iterate())

  def test_missing_library_says_what_to_install(self):
    _write_parquet(self.folder)
    with pytest.MonkeyPatch.context() as patch:
      patch.setitem(__import__("sys").modules, "pyarrow", None)
      with pytest.raises(ImportError, match=r"attnres-jax\[data\]"):
        list(_open("parquet", self.folder).iterate())
