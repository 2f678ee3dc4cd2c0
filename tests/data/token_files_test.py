# SPDX-License-Identifier: Apache-2.0
"""Token files, written here byte by byte from their description."""

import errno
import json
import os
import struct

import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.common import exits
from attnres_jax.data import packing
from attnres_jax.data import text_format

_IDS = [256, 104, 105, 0, 256, 255, 7, 7, 7, 1, 2, 3]


def _raw(ids, code="H"):
  return struct.pack(f"<{len(ids)}{code}", *ids)


def _rows(config, split):
  """Rows in the order of the file."""
  (tokens,) = data.open_dataset(config, split)._parts
  return packing.PackedRows(
    tokens, config.sequence_length, segment_ids=config.segment_ids
  )


class TestTokenFiles:
  @pytest.fixture(autouse=True)
  def set_up(self, tmp_path):
    self.folder = tmp_path

  def _config(self, path="", **fields):
    fields = dict(tokenizer="bytes", batch_size=1, sequence_length=2) | fields
    path = str(self.folder / path)
    return config_lib.DataConfig(source="tokens", path=path, **fields)

  def _write(self, name, content, sidecar=None):
    path = self.folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    if sidecar is not None:
      path.with_suffix(".json").write_text(json.dumps(sidecar))

  def _read(self, config, split="train"):
    """The sequence of tokens, reassembled from its rows."""
    rows = _rows(config, split)
    return [int(rows[0]["tokens"][0])] + [
      int(i)
      for row in rows
      for i, counts in zip(row["tokens"][1:], row["counts"][1:])
      if counts
    ]

  @pytest.mark.parametrize("code,dtype", [("H", "uint16"), ("I", "uint32")])
  def test_headerless_with_sidecar(self, code, dtype):
    self._write("x.bin", _raw(_IDS, code), {"dtype": dtype, "count": 12})
    for path in ("x.bin", "", "*.bin"):
      assert self._read(self._config(path)) == _IDS

  def test_shards_with_a_header(self):
    """Those of llm.c have one of 1024 bytes."""
    first, second = [300, 5, 6, 300, 9], [300, 1, 2, 3, 4]
    sidecar = {"dtype": "uint16", "header_bytes": 1024, "vocab_size": 301}
    for name, ids in (
      ("a_train_1", first), ("a_train_2", second), ("a_val_0", first),
    ):  # fmt: skip
      content = bytes(1024) + _raw(ids)
      self._write(f"{name}.bin", content, sidecar | {"separator_id": 300})
    config = self._config(tokenizer="ids", segment_ids=True)
    assert self._read(config) == first + second + [300]
    assert self._read(config, "validation") == first + [300]
    tokenizer = data.make_tokenizer(config)
    assert (tokenizer.vocab_size, tokenizer.separator_id) == (301, 300)
    row = _rows(config, "train")[1]
    assert list(row["tokens"]) == [6, 300, 9]
    assert list(row["segment_ids"]) == [1, 2, 2]

  def test_without_a_separator_no_id_ends_a_text(self):
    sidecar = {"dtype": "uint16", "vocab_size": 257}
    self._write("x.bin", _raw(_IDS), sidecar)
    config = self._config("x.bin", tokenizer="ids")
    assert text_format.of_data(config).end_ids == ()
    self._write("x.bin", _raw(_IDS), sidecar | {"separator_id": 0})
    assert text_format.of_data(config).end_ids == (0,)

  def test_validation_path(self):
    self._write("x.bin", _raw(_IDS), {"dtype": "uint16", "count": 12})
    self._write("y.bin", _raw([1, 2, 3]), {"dtype": "uint16", "count": 3})
    config = self._config("x.bin", validation_path=str(self.folder / "y.bin"))
    assert self._read(config) == _IDS
    assert self._read(config, "validation") == [1, 2, 3]
    with pytest.raises(
      config_lib.ConfigError, match="data.path.*or data.validation_path"
    ):
      data.open_dataset(self._config("x.bin"), "validation")

  @pytest.mark.parametrize(
    "sidecar,fields,message",
    [
      (None, {}, "sidecar x.json beside"),
      ([], {}, "x.json.*object"),
      ({"dtype": "uint8"}, {}, "x.json.*dtype"),
      ({"count": 11}, {}, "x.bin.*not of 24"),
      ({"count": 13}, {}, "26 bytes, as x.json says"),
      ({"count": None, "header_bytes": 30}, {}, "30 bytes, as x.json says"),
      ({"count": 10**15}, {}, "x.bin.*it is cut off or damaged"),
      ({"separator_id": 65536}, {}, "x.json.*to 65535"),
      ({"vocab_size": 9, "separator_id": 9}, {}, '"separator_id" up to 8'),
      ({"sha256": "00"}, {}, "x.bin.*SHA-256 00"),
      ({"vocab_size": 300}, {}, "tokenizer: got 'bytes'.*300 ids that .*x.bin"),
      (
        {"tokenizer": {"name": "hf", "sha256": "ab"}},
        {},
        "data.tokenizer: got 'bytes'.*name 'hf', not 'bytes'",
      ),
      ({"separator_id": 0}, {}, "by id 0, not by id 256"),
      ({}, {"segment_ids": True}, "data.segment_ids"),
      ({}, {"tokenizer": "ids"}, "vocab_size.*x.bin"),
      ({}, {"separator": "x"}, "data.separator: .*'x'"),
      ({}, {"tokenizer_path": "x"}, "data.tokenizer_path: .*'x'"),
    ],
  )
  def test_what_does_not_fit_is_named(self, sidecar, fields, message):
    if isinstance(sidecar, dict):
      sidecar = {"dtype": "uint16", "count": 12} | sidecar
    self._write("x.bin", _raw(_IDS), sidecar)
    with pytest.raises(config_lib.ConfigError, match=message):
      data.open_dataset(self._config("x.bin", **fields), "train")

  @pytest.mark.parametrize("num_threads", [0, 2])
  @pytest.mark.parametrize(
    "content,message",
    [
      (_raw([7] * 2999), "has 5998 bytes now, 6000 when it was opened"),
      (None, "No such file"),
      (_raw([300] * 3000), "token id 300.*vocabulary size 257"),
    ],
    ids=["cut off", "gone", "other ids"],
  )
  def test_a_file_that_changes_under_a_run(self, num_threads, content, message):
    sidecar = {"dtype": "uint16", "count": 3000}
    self._write("x.bin", _raw([7] * 3000), sidecar)
    config = self._config(num_threads=num_threads)
    batches = data.open_dataset(config, "train").batches()
    next(batches)
    if content is None:
      (self.folder / "x.bin").unlink()
    else:
      with open(self.folder / "x.bin", "r+b") as file:
        file.write(content)
        file.truncate()
    with pytest.raises(config_lib.RunError, match=message):
      for _ in range(3000):
        next(batches)
    batches.close()

  @pytest.mark.parametrize("error", [(errno.EIO, "It fails"), ("It fails",)])
  @pytest.mark.parametrize("num_threads", [0, 2])
  def test_a_failed_disk_may_work_again(self, num_threads, error, monkeypatch):
    self._write("x.bin", _raw([7] * 3000), {"dtype": "uint16"})
    config = self._config(num_threads=num_threads)
    batches = data.open_dataset(config, "train").batches()
    next(batches)

    def fail(*args):
      raise OSError(*error)

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(OSError, match="It fails") as raised:
      for _ in range(3000):
        next(batches)
    assert exits.of_error(raised.value) == exits.Exit.AGAIN
    # Without a number, as of gcsfs, a name would hide the text.
    named = str(self.folder / "x.bin") if len(error) > 1 else None
    assert raised.value.filename == named
    batches.close()

  def test_ids_outside_the_vocabulary(self):
    ids = _IDS[:-1] + [257]
    self._write("x.bin", _raw(ids), {"dtype": "uint16", "count": 12})
    with pytest.raises(
      config_lib.ConfigError,
      match=r"below the vocabulary size 257 \(found 257\)",
    ):
      data.open_dataset(self._config(), "train")

  def test_missing_and_empty(self):
    with pytest.raises(config_lib.ConfigError, match="data.path.*[*].bin"):
      data.open_dataset(self._config(), "train")
    self._write("x.bin", b"", {"dtype": "uint16", "count": 0})
    with pytest.raises(config_lib.ConfigError, match="train tokens at all"):
      data.open_dataset(self._config(), "train")
    self._write("y.bin", _raw(_IDS), {"dtype": "uint16"})
    empty = str(self.folder / "x.bin")
    config = self._config("y.bin", validation_path=empty)
    message = "validation_path: got .*x.bin', expected any validation"
    with pytest.raises(config_lib.ConfigError, match=message):
      data.open_dataset(config, "validation")

  def test_description_identifies_the_content(self):
    sidecar = {"dtype": "uint16", "count": 200_000}
    ids = np.arange(200_000) % 256
    descriptions = []
    for change in (0, 1):
      ids[-1] += change
      self._write("x.bin", ids.astype("<u2").tobytes(), sidecar)
      dataset = data.open_dataset(self._config(), "train")
      descriptions.append(dataset.describe())
      json.dumps(descriptions[-1])
    first, second = (d["fingerprint"] for d in descriptions)
    assert first != second
    (file,) = descriptions[0]["files"]
    assert file["name"] == "x.bin"
    assert file["tokens"] == 200_000

  def _vocabulary(self, ids, special):
    """Writes a vocabulary file and returns the fields that read it."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(ids)}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(self.folder / "tokenizer.json"))
    path = str(self.folder / "tokenizer.json")
    return {"tokenizer": "hf", "tokenizer_path": path}

  def test_another_separator_is_refused_with_both_named(self):
    """Llama 3's files open a document, and its tokenizer ends a text."""
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    reserved = [f"<|reserved_{i}|>" for i in range(254)]
    first = 50
    fields = self._vocabulary(first, [begin, end, *reserved])
    ids = [first, 5, 6, first, 7, 8]
    sidecar = {"dtype": "uint32", "separator_id": first}
    self._write("x.bin", _raw(ids, "I"), sidecar)
    message = rf"by id {first} \(.*begin.*\), not by id {first + 1} \(.*end"
    with pytest.raises(config_lib.ConfigError, match=message):
      data.open_dataset(self._config("x.bin", **fields), "train")
    config = self._config("x.bin", **fields, separator=begin)
    assert data.make_tokenizer(config).separator_id == first
    assert self._read(config) == [*ids, first]

  def test_a_separator_that_the_vocabulary_does_not_have(self):
    fields = self._vocabulary(9, ["</s>"])
    self._write("x.bin", _raw([9, 1, 2]), {"dtype": "uint16"})
    config = self._config("x.bin", **fields, separator="<eot>")
    with pytest.raises(config_lib.ConfigError, match="data.separator: .*<eot>"):
      data.open_dataset(config, "train")
