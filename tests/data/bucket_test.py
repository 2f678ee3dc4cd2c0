# SPDX-License-Identifier: Apache-2.0
"""gs:// paths, on a bucket that is a local folder behind fsspec.

The calls reach Google Storage through gcsfs; a local disk answers.
"""

import json

from etils.epath import backend
from fsspec.implementations import dirfs
from fsspec.implementations import local
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.common import stores
from attnres_jax.data import prepare


class _Buckets(dirfs.DirFileSystem):
  """gs://bucket/name is the file bucket/name below one folder."""

  def _join(self, path):
    if isinstance(path, str):
      path = path.removeprefix("gs://")
    return super()._join(path)


class TestBucket:
  @pytest.fixture(autouse=True)
  def set_up(self, tmp_path, monkeypatch):
    root = tmp_path
    self.bucket = root / "remote" / "bucket"
    self.bucket.mkdir(parents=True)
    self.cache = root / "cache"
    buckets = _Buckets(
      path=str(root / "remote"), fs=local.LocalFileSystem(auto_mkdir=True)
    )
    monkeypatch.setattr(
      type(backend.fsspec_backend), "_get_filesystem", lambda _, name: buckets
    )
    monkeypatch.setattr(stores, "client", lambda path: buckets)
    monkeypatch.setenv("ATTNRES_JAX_CACHE", str(self.cache))
    folder = self.bucket / "texts" / "deep"
    folder.mkdir(parents=True)
    lines = [json.dumps({"text": f"text {i} " * 9}) for i in range(50)]
    (folder / "a.jsonl").write_text("\n".join(lines[:30]))
    (folder / "b.jsonl").write_text("\n".join(lines[30:]))

  def _config(self, source="jsonl", path="gs://bucket/texts", **fields):
    return config_lib.DataConfig(
      source=source, path=path, sequence_length=32, batch_size=2,
      validation_fraction=0.2, **fields,
    )  # fmt: skip

  def _line(self, config, split):
    (tokens,) = data.open_dataset(config, split)._parts
    return tokens.read(0, len(tokens))

  def test_prepares_and_reads(self):
    here = self._config(path=str(self.bucket / "texts"))
    there = self._config()
    prepare.prepare(there, "gs://bucket/out", shard_tokens=500, progress=False)
    assert (self.bucket / "out" / "train-00001.bin").is_file()
    assert not list((self.bucket / "out").glob("*.tmp"))
    prepared = self._config("tokens", "gs://bucket/out")
    for split in ("train", "validation"):
      expected = self._line(here, split)
      np.testing.assert_array_equal(self._line(there, split), expected)
      np.testing.assert_array_equal(self._line(prepared, split), expected)
    # Mapped from copies, made once.
    copies = {p: p.stat().st_mtime_ns for p in self.cache.rglob("*.bin")}
    assert copies
    self._line(prepared, "train")
    again = {p: p.stat().st_mtime_ns for p in self.cache.rglob("*.bin")}
    assert again == copies

  def test_globs(self):
    one = self._config(path="gs://bucket/texts/deep/a*.jsonl")
    assert "text 29 " in self._text(one)
    assert "text 30 " not in self._text(one)
    assert self._text(self._config(path="gs://bucket/**/a.jsonl")) == (
      self._text(one)
    )

  def test_missing(self):
    for path in ("gs://bucket/none", "gs://bucket/none/*.jsonl"):
      with pytest.raises(config_lib.ConfigError, match="data.path: got 'gs"):
        data.open_dataset(self._config(path=path), "train")

  def _text(self, config):
    tokenizer = data.make_tokenizer(config)
    lines = (self._line(config, s) for s in ("train", "validation"))
    return "".join(tokenizer.decode(line) for line in lines)
