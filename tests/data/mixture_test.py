# SPDX-License-Identifier: Apache-2.0
"""Rows of several paths, in proportion to their weights."""

import itertools
import json

import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import data
from tests.data import token_file

LENGTH, BATCH = 4, 6
# Rows of each path; ids of path i start at 1000 i.
ROWS = (11, 30, 50)
WEIGHTS = (0.5, 0.3, 0.2)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
  folders = []
  for i, rows in enumerate(ROWS):
    folder = tmp_path_factory.mktemp(f"path{i}")
    ids = 1000 * i + np.arange(rows * LENGTH + 1)
    for split in ("train", "validation"):
      token_file.write(folder / f"{split}.bin", ids, vocab_size=4000)
    folders.append(str(folder))
  return tuple(folders)


def _open(paths, split="train", process=(0, 1), **fields):
  fields = dict(
    source="tokens", tokenizer="ids", sequence_length=LENGTH, batch_size=BATCH,
    paths=paths, weights=WEIGHTS,
  ) | fields  # fmt: skip
  index, count = process
  config = config_lib.DataConfig(**fields)
  return data.open_dataset(
    config, split, process_index=index, process_count=count
  )


def _first_ids(batches, count):
  ids = [b["tokens"][:, 0] for b in itertools.islice(batches, count)]
  batches.close()
  return np.stack(ids)


def test_shares_are_exact_and_every_row_comes_once_an_epoch(paths):
  rows = _first_ids(_open(paths).batches(), 50).ravel()
  assert [np.sum(rows // 1000 == i) for i in range(3)] == [150, 90, 60]
  # Everywhere, not only in the end.
  for start in range(0, 300, 10):
    part = rows[start : start + 10] // 1000
    assert [np.sum(part == i) for i in range(3)] == [5, 3, 2]
  first = rows[rows < 1000]
  epochs = [first[i : i + 11] for i in (0, 11)]
  assert [len(set(epoch)) for epoch in epochs] == [11, 11]
  assert list(epochs[0]) != list(epochs[1])


def test_position_is_one_number(paths):
  ids = _first_ids(_open(paths).batches(), 40)
  later = _open(paths).batches()
  later.set_state(later.get_state() | {"next_batch": 33})
  np.testing.assert_array_equal(_first_ids(later, 7), ids[33:])
  batches = _open(paths).batches()
  next(batches)
  state = json.loads(json.dumps(batches.get_state()))
  batches.close()
  parts = [_open(paths, process=(i, 2)).batches() for i in range(2)]
  for part in parts:
    part.set_state(state)
  resumed = np.concatenate([_first_ids(part, 5) for part in parts], axis=1)
  np.testing.assert_array_equal(resumed, ids[1:6])


def test_one_path_with_all_the_weight_is_that_path(paths):
  mixed = _open(paths[:1], weights=(1.0,))
  plain = _open((), weights=(), path=paths[0])
  np.testing.assert_array_equal(
    _first_ids(mixed.batches(), 9), _first_ids(plain.batches(), 9)
  )
  assert mixed.describe() == plain.describe()


def test_validation_is_mixed_until_one_path_ends(paths):
  dataset = _open(paths, "validation")
  assert dataset.num_rows == 22
  rows = _first_ids(dataset.batches(), 100).ravel()
  assert len(rows) == 24  # With two rows of padding.
  assert len(set(rows[:22])) == 22 and np.sum(rows[:22] < 1000) == 11
  mixed = _open(paths, "validation", validation_path=paths[2])
  rows = _first_ids(mixed.batches(), 100).ravel()[: mixed.num_rows]
  assert set(rows // 1000) == {2} and len(rows) == 50


def test_weights_are_part_of_what_is_read(paths):
  state = _open(paths).batches().get_state()
  other = _open(paths, weights=(0.2, 0.3, 0.5)).batches()
  with pytest.raises(ValueError, match="of other data"):
    other.set_state(state)


@pytest.mark.parametrize(
  "fields,message",
  [({"weights": (0.5, 0.5)}, "data.weights: got .* each of the 3 data.paths"),
   ({"weights": (0.5, 0.3, 0.3)}, "data.weights: got .* add up to 1"),
   ({"path": "x"}, "data.path: got 'x', expected nothing, with data.paths"),
   ({"source": "stdlib", "tokenizer": "bytes"}, "expected nothing, with data")],
)  # fmt: skip
def test_refused(paths, fields, message):
  with pytest.raises(config_lib.ConfigError, match=message):
    _open(paths, **fields)
