# SPDX-License-Identifier: Apache-2.0
"""Any content of the files that data is read from."""

import json

from hypothesis import strategies as st
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.data import prepare
from tests.fuzz import laws

IDS = np.arange(300, dtype="<u2") % 256
SPLIT = {"files": ["x.bin"], "tokens": 300, "documents": 1, "bytes": 9}
# name of a file: the good content.
GOOD = {
  "x.json": {
    "dtype": "uint16",
    "count": len(IDS),
    "header_bytes": 0,
    "vocab_size": 257,
    "separator_id": 256,
    "tokenizer": {"name": "bytes"},
    "sha256": None,
  },
  "dataset.json": {
    "complete": True,
    "settings": {},
    "splits": {"train": SPLIT, "validation": SPLIT},
  },
  "a.jsonl": {"text": "some text " * 20, "id": 1},
  "tokenizer.json": {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {
      "type": "WordLevel",
      "vocab": {"some": 0, "text": 1, "[UNK]": 2},
      "unk_token": "[UNK]",
    },
  },
}


def _changed(values, path, change):
  """A copy in which the field at `path` has another value, or is missing."""
  if not isinstance(values, dict) or not path or not values:
    return change
  copy = dict(values)
  key = list(copy)[path[0] % len(copy)]
  if change is ...:
    del copy[key]
  else:
    copy[key] = _changed(copy[key], path[1:], change)
  return copy


def _read(root, source, tokenizer):
  fields = dict(batch_size=1, sequence_length=2, num_threads=0)
  path = {"tokens": "", "jsonl": "a.jsonl"}[source]
  config = config_lib.DataConfig(
    source=source,
    path=str(root / "train" / path),
    validation_path=str(root / "held_out" / path),
    tokenizer=tokenizer,
    tokenizer_path=str(root / "train" / "tokenizer.json") * (tokenizer == "hf"),
    **fields,
  )
  for split in ("train", "validation"):
    dataset = data.open_dataset(config, split)
    json.dumps([dataset.describe(), dataset.identity()])
    batches = dataset.batches()
    next(batches)
    batches.close()


def _write(root, name="a.jsonl", content=None):
  """Good files for both splits, but one with other content."""
  for split in ("train", "held_out"):
    folder = root / split
    (folder / "other").mkdir(parents=True, exist_ok=True)
    for file, values in GOOD.items():
      (folder / file).write_text(json.dumps(values))
    (folder / "x.bin").write_bytes(IDS.tobytes())
    if content is not None:
      (folder / name).write_bytes(content)


@pytest.mark.parametrize("source", ["tokens", "jsonl"])
def test_good_files(source, tmp_path):
  _write(tmp_path)
  _read(tmp_path, source, "bytes")


@laws.shares(150, 4000)
def test_files(tmp_path, explore):
  def check(name, path, change, as_bytes, source, tokenizer):
    bad = _changed(GOOD[name], path, change)
    content = json.dumps(None if bad is ... else bad, default=repr).encode()
    _write(tmp_path, name, as_bytes or content)
    laws.guarded(_read, tmp_path, source, tokenizer)
    folder = tmp_path / "train"
    laws.outcome(
      prepare.main,
      ["--source=jsonl", f"--path={folder / 'a.jsonl'}", f"--output={folder}"],
    )

  content = [b"", b"\0", b"\xff", b"{", b"[" * 100_000, b"null", b'{"a": 1}\n']
  explore(
    "files of data",
    check,
    st.sampled_from(sorted(GOOD)),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    laws.values | st.just(...),
    st.none() | st.sampled_from(content),
    st.sampled_from(["tokens", "jsonl"]),
    st.sampled_from(["bytes", "ids", "hf"]),
  )
