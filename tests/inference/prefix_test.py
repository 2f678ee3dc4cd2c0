# SPDX-License-Identifier: Apache-2.0
"""A trie of chunks, with arrays of known sizes."""

import numpy as np
import pytest

from attnres_jax.inference import prefix

TOKENS, STATE = np.zeros(10, np.int8), np.zeros(100, np.int8)


def _trie(recurrent=True, most_bytes=10**6):
  return prefix.Trie(chunk=2, recurrent=recurrent, most_bytes=most_bytes)


def _add(trie, ids):
  for end in range(2, len(ids) + 1, 2):
    trie.add(ids[:end], TOKENS, STATE if trie.recurrent else None)


@pytest.mark.parametrize("recurrent", [False, True])
def test_finds_the_longest_common_part(recurrent):
  trie = _trie(recurrent)
  _add(trie, [1, 2, 3, 4, 5, 6])
  _add(trie, [1, 2, 7, 8])
  for prompt, chunks in (
    ([1, 2, 3, 4, 5, 6, 9], 3),
    ([1, 2, 3, 4, 5, 6], 2),  # The last token has to be computed.
    ([1, 2, 7, 8, 5, 6, 9], 2),
    ([1, 2, 3, 9], 1),
    ([1, 9, 3, 4], 0),
    ([1], 0),
  ):
    assert len(trie.find(prompt)) == chunks
  assert trie.knows([1, 2, 7, 8]) and not trie.knows([1, 2, 7, 9])
  # Four chunks, since one is common.
  assert trie.num_bytes == 4 * (10 + 100 * recurrent)


def test_a_hit_ends_at_a_state():
  trie = _trie()
  _add(trie, [1, 2, 3, 4, 5, 6])
  path = trie.find([1, 2, 3, 4, 5, 6, 7])
  path[2].state = path[0].state = None
  assert trie.find([1, 2, 3, 4, 5, 6, 7]) == path[:2]
  path[1].state = None
  assert trie.find([1, 2, 3, 4, 5, 6, 7]) == []
  assert not trie.knows([1, 2])


def test_what_is_oldest_in_use_is_dropped():
  trie = _trie(most_bytes=330)
  for first in (1, 2, 3):
    _add(trie, [first, 0])
  trie.find([1, 0, 0])
  _add(trie, [4, 0])
  assert trie.num_bytes == 330
  assert [len(trie.find([first, 0, 0])) for first in (1, 2, 3, 4)] == [
    1, 0, 1, 1,
  ]  # fmt: skip


def test_inner_nodes_lose_their_states():
  trie = _trie(most_bytes=130)
  _add(trie, [1, 2, 3, 4])
  # 220 bytes: the state of the inner node is older than the leaf.
  assert trie.num_bytes == 120
  assert len(trie.find([1, 2, 3, 4, 5])) == 2
  assert trie.find([1, 2, 9]) == []


def test_a_chunk_without_its_parents_is_not_added():
  trie = _trie()
  trie.add([1, 2, 3, 4], TOKENS, STATE)
  assert trie.num_bytes == 0 and trie.find([1, 2, 3, 4, 5]) == []
