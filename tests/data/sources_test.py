# SPDX-License-Identifier: Apache-2.0
"""Texts are tokenised in pieces, of which a document consists."""

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


@pytest.mark.parametrize("piece", [4, 5, 8, 1000])
@pytest.mark.parametrize("at_once", [1, 10, 1000])
@pytest.mark.parametrize("start", [0, 3])
def test_documents_are_whole(piece, at_once, start, monkeypatch):
  monkeypatch.setattr(sources, "_PIECE_BYTES", piece)
  monkeypatch.setattr(sources, "_ENCODE_BYTES", at_once)
  tokenizer = data.make_tokenizer(config_lib.DataConfig())
  calls, plain = [], tokenizer.encode_batch

  def encode_batch(texts):
    calls.append(texts)
    return plain(texts)

  monkeypatch.setattr(tokenizer, "encode_batch", encode_batch)
  with tqdm.tqdm(disable=True) as bar:
    found = list(
      sources.encode(
        sources.Opened(_Texts(), None, ""), ("train",), tokenizer, start=start,
        bar=bar,
      )
    )  # fmt: skip
  expected = {n: t for n, t in enumerate(_TEXTS) if t and n >= start}
  assert {one.number: one.text for one in found} == expected
  for one in found:
    np.testing.assert_array_equal(one.ids, [256, *one.text])
  pieces = [text for texts in calls for text in texts]
  assert b"".join(pieces) == b"".join(expected.values())
  assert max(map(len, pieces)) <= piece
  for texts in calls:
    assert sum(map(len, texts[:-1])) < at_once
  # A piece ends with a line where it can.
  if piece == 8:
    assert {b"a line\n"} <= set(pieces)
