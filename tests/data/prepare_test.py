# SPDX-License-Identifier: Apache-2.0
"""Prepared files equal tokenising in memory, whatever interrupts."""

import json
import re
import signal
import subprocess
import sys
import time
from unittest import mock

import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.data import prepare
from attnres_jax.data import tokenizer as tokenizer_lib
from tests.fuzz import laws

_NUM_TEXTS = 120


class _Interrupting(tokenizer_lib.BytesTokenizer):
  """Bytes, until the text that says stop."""

  def encode_batch(self, texts):
    if any(b"text 61 " in text for text in texts):
      raise KeyboardInterrupt
    return super().encode_batch(texts)


class TestPrepare:
  @pytest.fixture(autouse=True)
  def set_up(self, tmp_path, monkeypatch):
    root = tmp_path
    self.path = root / "texts.jsonl"
    self.output = root / "out"
    lines = [
      json.dumps({"text": f"text {i} " + chr(97 + i % 26) * (i * 7 % 90)})
      for i in range(_NUM_TEXTS)
    ]
    lines.insert(10, json.dumps({"text": ""}))
    self.path.write_text("\n".join(lines))
    # Small batches of encoding, so that interruptions fall between them.
    monkeypatch.setattr(prepare.sources, "_ENCODE_BYTES", 100)

  def _config(self, **fields):
    defaults = dict(
      source="jsonl", path=str(self.path), validation_fraction=0.2,
      sequence_length=16, batch_size=2,
    )  # fmt: skip
    return config_lib.DataConfig(**(defaults | fields))

  def _prepared(self, **fields):
    fields = {"source": "tokens", "path": str(self.output)} | fields
    return self._config(**fields)

  def _prepare(self, config=None, **kwargs):
    kwargs = {"shard_tokens": 300, "progress": False} | kwargs
    return prepare.prepare(config or self._config(), str(self.output), **kwargs)

  def _line(self, config, split):
    (tokens,) = data.open_dataset(config, split)._parts
    return tokens.read(0, len(tokens))

  def _contents(self):
    return {p.name: p.read_bytes() for p in self.output.iterdir()}

  def test_holds_what_tokenising_in_memory_gives(self):
    dataset = self._prepare()
    assert dataset.complete
    for split in ("train", "validation"):
      expected = self._line(self._config(), split)
      np.testing.assert_array_equal(
        self._line(self._prepared(), split), expected
      )
      written = dataset.splits[split]
      assert written.tokens == len(expected)
      assert len(written.files) > 1
      assert written.tokens == written.bytes + written.documents
    documents = sum(s.documents for s in dataset.splits.values())
    assert documents == _NUM_TEXTS

  def test_shards_begin_and_end_with_documents(self):
    dataset = self._prepare()
    for name in dataset.splits["train"].files:
      ids = np.fromfile(self.output / name, "<u2")
      assert ids[0] == 256
      texts = bytes(np.where(ids == 256, 0, ids).astype("u1")).split(b"\0")
      assert all(text.startswith(b"text ") for text in texts[1:])
      # At most one document (99 ids) past the size that was asked for.
      assert len(ids) < 300 + 99
      assert not list(self.output.glob("*.tmp"))

  def test_a_validation_path_is_the_whole_split(self):
    other = self.path.with_name("held_out.jsonl")
    other.write_text(json.dumps({"text": "held out by its own path"}))
    config = self._config(validation_path=str(other))
    self._prepare(config)
    line = self._line(self._prepared(batch_size=1), "validation")
    assert bytes(line[1:].tolist()) == b"held out by its own path"
    total = len(self._line(self._prepared(), "train"))
    split = len(self._line(self._config(), "train"))
    assert total > split

  def test_doing_it_again_changes_nothing(self):
    first = self._prepare()
    times = {p.name: p.stat().st_mtime_ns for p in self.output.iterdir()}
    assert self._prepare() == first
    again = {p.name: p.stat().st_mtime_ns for p in self.output.iterdir()}
    assert again == times

  def test_resumes_after_an_interruption(self):
    self._prepare()
    expected = self._contents()
    for path in self.output.iterdir():
      path.unlink()
    with mock.patch.dict(tokenizer_lib.TOKENIZERS, {"bytes": _Interrupting}):
      with pytest.raises(KeyboardInterrupt):
        self._prepare()
    part = self._contents()
    assert not json.loads(part["dataset.json"])["complete"]
    assert "train-00001.bin" in part
    assert set(part) < set(expected)
    with pytest.raises(config_lib.ConfigError, match="interrupted"):
      data.open_dataset(self._prepared(), "train")
    # Files that a kill between two renames, or during a write, leaves.
    last = max(name for name in part if name.endswith(".bin"))
    (self.output / last).with_suffix(".json").unlink()
    (self.output / last).write_bytes(b"half")
    (self.output / "train-00009.bin.tmp").write_bytes(b"half")
    self._prepare()
    assert self._contents() == expected

  def test_a_part_of_a_text_is_refused_under_any_path(self):
    self._prepare()
    file = self.output / "dataset.json"
    values = json.loads(file.read_text())
    names = {
      str(self.output), f"{self.output}/", f"{self.output}/*.bin",
      f"{self.output}/train-00000.bin,{self.output}", str(self.output.parent),
    }  # fmt: skip
    for complete in (True, False):
      file.write_text(json.dumps(values | {"complete": complete}))
      for name in names:
        config = self._prepared(path=name)
        if complete:
          assert data.open_dataset(config, "train").num_tokens
          continue
        with pytest.raises(config_lib.ConfigError, match="interrupted"):
          data.open_dataset(config, "train")

  @pytest.mark.more
  def test_a_kill_loses_nothing_that_was_whole(self):
    # The real command on the real corpus, killed after a few shards.
    command = [
      sys.executable, "-m", "attnres_jax.data.prepare",
      "--shard_tokens=100000", f"--output={self.output}",
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (self.output / "train-00003.json").exists():
      assert process.poll() is None
      assert time.monotonic() < deadline
      time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed = self._contents()
    assert not json.loads(killed["dataset.json"])["complete"]
    config = config_lib.DataConfig()
    self._prepare(config, shard_tokens=100000)
    finished = self._contents()
    for name in ("train-00000.bin", "train-00003.bin"):
      assert finished[name] == killed[name]
    for split in ("train", "validation"):
      np.testing.assert_array_equal(
        self._line(self._prepared(), split), self._line(config, split)
      )

  @pytest.mark.parametrize(
    "fields,more,message",
    [
      ({"validation_fraction": 0.5}, "", "same options.*split_rule"),
      ({}, '\n{"text": "more"}', "listing_sha256"),
    ],
  )
  def test_other_options_and_sources_are_refused(self, fields, more, message):
    self._prepare()
    before = self._contents()
    self.path.write_text(self.path.read_text() + more)
    message = f"--output: got '.*out'.*{message}"
    with pytest.raises(config_lib.ConfigError, match=message):
      self._prepare(self._config(**fields))
    assert self._contents() == before

  @pytest.mark.parametrize(
    "name,message",
    [
      ("thesis.tex", "an empty folder"),
      ("dataset.json", "that prepare has writ"),
    ],
  )
  def test_a_folder_of_others_is_refused(self, name, message):
    self.output.mkdir()
    (self.output / name).write_text('{"text": "precious"}')
    before = self._contents()
    with pytest.raises(config_lib.ConfigError, match=message):
      self._prepare()
    assert self._contents() == before

  def test_a_shard_cut_off_later_is_named(self):
    self._prepare()
    path = self.output / "train-00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(config_lib.ConfigError, match="train-00001.bin"):
      data.open_dataset(self._prepared(), "train")

  def test_numbers_of_an_interrupted_folder_have_bounds(self):
    self._prepare()
    for name, change in {
      "dataset.json": {"complete": False},
      "train-00000.json": {"next_document": None},
    }.items():
      path = self.output / name
      path.write_text(json.dumps(json.loads(path.read_text()) | change))
    message = r"train-00000.json: next_document: got None, expected a "
    with pytest.raises(config_lib.ConfigError, match=message):
      self._prepare()

  @pytest.mark.parametrize(
    "args,message",
    [
      (("--source=tokens", "--path=x"), "data.source: got 'tokens'.*jsonl"),
      (("--source=jsonl",), "data.path"),
      (("--source=jsonl", "--path=/nowhere"), "data.path: got '/nowhere'"),
      (("--tokenizer=bpe", "--tokenizer_path=x"), "data.tokenizer: got 'bpe'"),
      (("--shard_tokens=0",), "--shard_tokens: got 0"),
    ],
  )
  def test_errors_are_one_line(self, args, message):
    args = [f"--output={self.output}", *args]
    status, out, err = laws.outcome(prepare.main, args)
    assert (status, out) == (2, "") and re.search(message, err)
    assert not self.output.exists()
