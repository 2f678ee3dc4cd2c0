# SPDX-License-Identifier: Apache-2.0
"""A network learns all that its text says, once, and nothing else.

Words are numbers that occur once in the whole corpus. So from the batches alone
one can tell of every target which document it belongs to.
"""

import collections
import json
import struct

import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.data import packing
from attnres_jax.data import prepare
from attnres_jax.models import loss as loss_lib
from tests import tiers
from tests.data import token_file

_END = "<|endoftext|>"
_NUM_WORDS = 400
_SEPARATOR = _NUM_WORDS


def _tokenizer(folder):
  """A vocabulary file with word i as id i, and the separator after them."""
  vocabulary = {f"w{i}": i for i in range(_NUM_WORDS)}
  values = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
    "post_processor": None, "decoder": None,
    "added_tokens": [{
      "id": _SEPARATOR, "content": _END, "special": True, "lstrip": False,
      "rstrip": False, "normalized": False, "single_word": False,
    }],
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
  }  # fmt: skip
  path = folder / "tokenizer.json"
  path.write_text(json.dumps(values))
  return {"tokenizer": "hf", "tokenizer_path": str(path)}


def _documents(seed):
  """Documents of 1 to 9 words, which are all different."""
  rng = np.random.default_rng(seed)
  words = rng.permutation(np.arange(1, _NUM_WORDS))[: rng.integers(60, 200)]
  cuts = np.cumsum(rng.integers(1, 10, len(words)))
  split = np.split(words, cuts[cuts < len(words)])
  return [document.tolist() for document in split]


def _text(document):
  return " ".join(f"w{i}" for i in document)


def _jsonl(folder, documents):
  lines = [json.dumps({"text": _text(words)}) for words in documents]
  (folder / "a.jsonl").write_text("\n".join([*lines, '{"text": ""}']))
  (folder / "val.jsonl").write_text(json.dumps({"text": "w0 w0"}))
  return {"source": "jsonl", "path": str(folder)}


def _prepared(folder, documents):
  config = config_lib.DataConfig(
    **_jsonl(folder, documents), **_tokenizer(folder)
  )
  out = folder / "out"
  prepare.prepare(config, str(out), shard_tokens=50, progress=False)
  assert len(list(out.glob("train-*.bin"))) > 1
  return {"source": "tokens", "path": str(out)}


def _sidecar(folder, documents, ends=False):
  ids = []
  for document in documents:
    ids += [*document, _SEPARATOR] if ends else [_SEPARATOR, *document]
  token_file.write(folder / "train.bin", ids, separator_id=_SEPARATOR)
  return {"source": "tokens", "path": str(folder)}


def _ending(folder, documents):
  """With the separator after each document, as nanoGPT has it."""
  return _sidecar(folder, documents, ends=True)


def _header(folder, documents):
  """Two shards as of llm.c, of which the second begins inside a document."""
  ids = [i for document in documents for i in [50256, *document]]
  sidecar = {
    "dtype": "uint16", "header_bytes": 1024, "vocab_size": 50257,
    "separator_id": 50256,
  }  # fmt: skip
  for number, part in enumerate((ids[:43], ids[43:])):
    content = bytes(1024) + struct.pack(f"<{len(part)}H", *part)
    (folder / f"c_train_{number:06}.bin").write_bytes(content)
    (folder / f"c_train_{number:06}.json").write_text(json.dumps(sidecar))
  return {"source": "tokens", "path": str(folder), "tokenizer": "ids"} | {
    "tokenizer_path": ""
  }


_WAYS = {
  "jsonl": _jsonl, "prepared": _prepared, "sidecar": _sidecar,
  "ending": _ending, "header": _header,
}  # fmt: skip


def _expected(way, documents, separator):
  """Pairs of a token and the one to predict after it: each exactly once."""
  pairs = []
  for number, document in enumerate(documents):
    line = [separator, *document, separator]
    if way == "ending" and number == 0:
      line = line[1:]  # Nothing says that a document begins here.
    pairs += zip(line, line[1:])
  return collections.Counter(pairs)


@tiers.parametrize("segment_ids", [False, True], first=[True])
@pytest.mark.parametrize("way", _WAYS)
def test_each_token_is_learned_once_from_its_document(
  way, segment_ids, tmp_path
):
  for seed, (length, batch) in enumerate([(9, 1), (10, 3), (31, 4), (64, 2)]):
    folder = tmp_path / str(seed)
    folder.mkdir()
    documents = _documents(seed)
    made = _WAYS[way](folder, documents)
    config = config_lib.DataConfig(
      **_tokenizer(folder) | made,
      segment_ids=segment_ids, sequence_length=length, batch_size=batch,
    )  # fmt: skip
    separator = data.make_tokenizer(config).separator_id
    dataset = data.open_dataset(config, "train")
    batches = dataset.batches()
    rows = []
    while len(rows) < dataset.num_rows:
      step = next(batches)
      examples = loss_lib.Examples.of(step)
      segments = examples.segment_ids
      if segments is None:
        segments = np.ones_like(examples.inputs)
      rows += zip(*map(np.asarray, (*examples[:3], segments)), strict=True)
    batches.close()
    _check(rows[: dataset.num_rows], way, documents, separator, segment_ids)


def _check(rows, way, documents, separator, segment_ids):
  owner = {word: n for n, words in enumerate(documents) for word in words}
  learned = collections.Counter()
  for inputs, targets, weights, segments in rows:
    np.testing.assert_array_equal(inputs[1:], targets[:-1])
    for at in np.flatnonzero(weights):
      learned[int(inputs[at]), int(targets[at])] += 1
      # What attention sees of the row: this document, up to here.
      seen = inputs[: at + 1][segments[: at + 1] == segments[at]].tolist()
      if segment_ids:
        assert seen == inputs[at + 1 - len(seen) : at + 1].tolist()
        word = next(int(i) for i in (targets[at], inputs[at]) if i != separator)
        tokens = [separator, *documents[owner[word]], separator]
        stop = tokens.index(word) + (targets[at] == separator)
        first = max(0, stop - at - 1)
        assert seen == tokens[first:stop]
  assert learned == _expected(way, documents, separator)


def test_one_text_is_one_document(tmp_path):
  """Split by position: nothing is in both parts, and nothing is lost."""
  document = [word for words in _documents(0) for word in words]
  file = tmp_path / "corpus.txt"
  file.write_text("\n".join(f"w{i}" for i in document))
  config = config_lib.DataConfig(
    source="text", path=str(file), **_tokenizer(tmp_path),
    validation_fraction=0.2, sequence_length=7, batch_size=3,
  )  # fmt: skip
  lines = []
  for split in ("train", "validation"):
    (tokens,) = data.open_dataset(config, split)._parts
    separator, *line = tokens.read(0, len(tokens)).tolist()
    assert separator == _SEPARATOR
    lines.append(line)
  assert lines[0] + lines[1] == document
  assert 0.17 < len(lines[1]) / len(document) < 0.21


def test_ids_outside_the_vocabulary_are_refused():
  """2**31 and above would turn negative, and pass, once they are int32."""
  ids = np.array([1, 9, 2**32 - 1], np.uint32)
  tokens = packing.Tokens(
    [ids], vocab_size=10, separator_id=None, description={}
  )
  np.testing.assert_array_equal(tokens.read(0, 2), [1, 9])
  with pytest.raises(packing.DataError, match="4294967295 .* size 10"):
    tokens.read(1, 3)
