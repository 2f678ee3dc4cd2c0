# SPDX-License-Identifier: Apache-2.0
"""Rows against the sequence of tokens that they are cut from."""

import numpy as np
import pytest

from attnres_jax.data import packing
from attnres_jax.data import tokens as tokens_lib

_SEPARATOR = 99


def _tokens(*lengths, vocab_size=100, separator_id=_SEPARATOR):
  ids = np.random.default_rng(0).integers(0, 100, sum(lengths), np.uint16)
  arrays = np.split(ids, np.cumsum(lengths)[:-1])
  return ids, tokens_lib.Tokens(
    arrays, vocab_size=vocab_size, separator_id=separator_id, description={}
  )


class TestTokens:
  def test_reads_like_the_concatenation(self):
    ids, tokens = _tokens(3, 0, 1, 7, 5)
    assert len(tokens) == 16
    for start in range(17):
      for stop in range(start, 17):
        read = tokens.read(start, stop)
        np.testing.assert_array_equal(read, ids[start:stop])
        assert read.dtype == np.int32

  def test_refuses_positions_outside(self):
    _, tokens = _tokens(4)
    for start, stop in ((-1, 2), (0, 5), (3, 2)):
      with pytest.raises(IndexError):
        tokens.read(start, stop)

  def test_refuses_ids_outside_the_vocabulary(self):
    # 2**31 and above would turn negative, and pass, once they are int32.
    for dtype, bad in ((np.uint16, 10), (np.uint32, 2**32 - 1)):
      tokens = tokens_lib.Tokens(
        [np.array([1, 9, bad], dtype)],
        vocab_size=10,
        separator_id=None,
        description={},
      )
      np.testing.assert_array_equal(tokens.read(0, 2), [1, 9])
      message = f"token id {bad} .* size 10"
      with pytest.raises(tokens_lib.DataError, match=message):
        tokens.read(1, 3)


class TestPackedRows:
  @pytest.mark.parametrize("length", (1, 4, 7))
  @pytest.mark.parametrize("lengths", ((40,), (5, 23, 12), (9,)))
  def test_every_token_but_the_first_is_a_target_once(self, length, lengths):
    ids, tokens = _tokens(*lengths)
    rows = packing.PackedRows(tokens, length)
    assert len(rows) == (len(ids) - 1) // length
    targets = []
    for row in rows:
      assert row["tokens"].shape == (length + 1,)
      targets.extend(row["tokens"][1:])
    np.testing.assert_array_equal(targets, ids[1 : 1 + len(rows) * length])
    # The dropped tokens would not have filled a row.
    assert len(ids) - 1 - len(targets) < length

  def test_inputs_precede_their_targets(self):
    ids, tokens = _tokens(30)
    row = packing.PackedRows(tokens, 5)[3]["tokens"]
    np.testing.assert_array_equal(row, ids[15:21])

  def test_too_short_for_one_row(self):
    for count in (1, 5):
      _, tokens = _tokens(count)
      assert not packing.PackedRows(tokens, 5)

  @pytest.mark.parametrize("seed", range(5))
  def test_segment_ids_number_documents_from_one(self, seed):
    rng = np.random.default_rng(seed)
    ids = rng.choice([1, 2, _SEPARATOR], 41, p=[0.4, 0.4, 0.2])
    tokens = tokens_lib.Tokens(
      [ids.astype(np.uint16)],
      vocab_size=100,
      separator_id=_SEPARATOR,
      description={},
    )
    for row in packing.PackedRows(tokens, 8, segment_ids=True):
      # A document begins at its separator or at the beginning of the row.
      expected, number = [], 1
      for position, token in enumerate(row["tokens"]):
        number += position > 0 and token == _SEPARATOR
        expected.append(number)
      np.testing.assert_array_equal(row["segment_ids"], expected)
      assert row["segment_ids"].dtype == np.int32

  def test_segment_ids_need_a_separator(self):
    _, tokens = _tokens(20, separator_id=None)
    with pytest.raises(ValueError, match="separator"):
      packing.PackedRows(tokens, 4, segment_ids=True)

  def test_refuses_rows_outside(self):
    _, tokens = _tokens(20)
    for index in (-1, 4):
      with pytest.raises(IndexError):
        packing.PackedRows(tokens, 4)[index]
