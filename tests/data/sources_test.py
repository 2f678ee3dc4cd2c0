# SPDX-License-Identifier: Apache-2.0
"""Documents are tokenised in batches, each as one text."""

import numpy as np
import pytest
import tqdm

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.data import documents
from attnres_jax.data import sources

_TEXTS = (
  b"", b"a", "é".encode() * 9, "\N{GRINNING FACE}".encode() * 5,
  b"a line\n" * 7,
  b"no line at all, but long", b"\n", b"ab\ncd\n\n\nefghijklmnopq\n",
)  # fmt: skip


class _Texts:
  def iterate(self, start=0):
    for number in range(start, len(_TEXTS)):
      yield documents.Document(str(number), _TEXTS[number])

  def describe(self):
    return {}


@pytest.mark.parametrize("at_once", [1, 10, 1000])
@pytest.mark.parametrize("start", [0, 3])
def test_documents_are_whole(at_once, start, monkeypatch):
  monkeypatch.setattr(sources, "_ENCODE_BYTES", at_once)
  tokenizer = data.make_tokenizer(config_lib.DataConfig())
  calls, plain = [], tokenizer.encode_batch

  def encode_batch(texts):
    calls.append(texts)
    return plain(texts)

  monkeypatch.setattr(tokenizer, "encode_batch", encode_batch)
  with tqdm.tqdm(disable=True) as bar:
    encoded = list(
      sources.encode(
        sources.Opened(_Texts(), None, ""), ("train",), tokenizer, start=start,
        bar=bar,
      )
    )  # fmt: skip
  expected = {n: t for n, t in enumerate(_TEXTS) if t and n >= start}
  assert {text.number: text.text for text in encoded} == expected
  for document in encoded:
    np.testing.assert_array_equal(document.ids, [256, *document.text])
  assert [text for texts in calls for text in texts] == [*expected.values()]
  for texts in calls:
    assert sum(map(len, texts[:-1])) < at_once


def test_ids_of_a_long_document_are_those_of_its_text(tmp_path, monkeypatch):
  """SentencePiece's put a space before a text, so a cut would be seen."""
  tokenizers = pytest.importorskip("tokenizers")
  model = tokenizers.Tokenizer(
    tokenizers.models.BPE({"\u2581": 0, "a": 1, "\n": 2, "<s>": 3}, [])
  )
  model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
    prepend_scheme="first"
  )
  model.save(str(tmp_path / "tokenizer.json"))
  tokenizer = data.make_tokenizer(
    config_lib.DataConfig(tokenizer="hf", tokenizer_path=str(tmp_path))
  )
  text = b"a" * 1_000 + b"\n" + b"a" * 300_000
  document = documents.Document("one", text)
  monkeypatch.setattr(_Texts, "iterate", lambda self, start=0: iter([document]))
  with tqdm.tqdm(disable=True) as bar:
    (encoded,) = sources.encode(
      sources.Opened(_Texts(), None, ""), ("train",), tokenizer, bar=bar
    )
  np.testing.assert_array_equal(encoded.ids[1:], tokenizer.encode(text))
  assert np.sum(encoded.ids == 0) == 1
