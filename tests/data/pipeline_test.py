# SPDX-License-Identifier: Apache-2.0
"""Batches: which rows, in which order, on how many processes, from where."""

import itertools
import json
import subprocess
import sys
import time

import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import data
from tests.data import token_file

_NUM_ROWS, _LENGTH = 23, 4
# In place of the number of a row.
_PADDING = -1


class TestPipeline:
  """A token file with consecutive ids: a row's first id names the row."""

  @pytest.fixture(autouse=True)
  def set_up(self, tmp_path):
    self.folder = tmp_path
    for split in ("train", "validation"):
      self._write(split, np.arange(_NUM_ROWS * _LENGTH + 1))

  def _write(self, split, ids, **fields):
    path = self.folder / f"{split}.bin"
    token_file.write(path, ids, vocab_size=1000, **fields)

  def _config(self, **fields):
    defaults = dict(
      source="tokens", path=str(self.folder), tokenizer="ids",
      sequence_length=_LENGTH, batch_size=4,
    )  # fmt: skip
    return config_lib.DataConfig(**(defaults | fields))

  def _open(self, split="train", process=(0, 1), **fields):
    index, count = process
    return data.open_dataset(
      self._config(**fields), split, process_index=index, process_count=count
    )

  def _rows(self, dataset, count, start=0):
    """The numbers of the rows of some batches, [count, batch]."""
    batches = dataset.batches()
    batches.set_state({"next_batch": start, "dataset": dataset.identity()})
    rows = []
    for batch in itertools.islice(batches, count):
      tokens, counts = batch["tokens"], batch["counts"]
      assert tokens.dtype == counts.dtype == np.int32
      is_real = counts.all(axis=1)
      np.testing.assert_array_equal(counts.any(axis=1), is_real)
      np.testing.assert_array_equal(
        tokens[is_real], (tokens[:, :1] + np.arange(_LENGTH + 1))[is_real]
      )
      rows.append(np.where(is_real, tokens[:, 0] // _LENGTH, _PADDING))
    batches.close()
    return np.array(rows)

  def test_an_epoch_holds_every_row_once_and_the_next_is_another_order(self):
    dataset = self._open()
    assert dataset.num_rows == _NUM_ROWS
    assert dataset.num_tokens == _NUM_ROWS * _LENGTH + 1
    rows = self._rows(dataset, _NUM_ROWS).reshape(-1)  # 4 epochs.
    epochs = rows.reshape(4, _NUM_ROWS)
    for epoch in epochs:
      assert sorted(epoch) == sorted(range(_NUM_ROWS))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    # Shuffled over all data: hardly any row keeps its place or neighbour.
    assert np.mean(epochs == np.arange(_NUM_ROWS)) < 0.2
    assert np.mean(np.diff(rows) == 1) < 0.2

  def test_the_seed_decides_the_order(self):
    first = self._rows(self._open(seed=1), 5)
    np.testing.assert_array_equal(self._rows(self._open(seed=1), 5), first)
    assert not np.array_equal(self._rows(self._open(seed=2), 5), first)

  @pytest.mark.parametrize("split", ("train", "validation"))
  @pytest.mark.parametrize("count", (2, 4))
  @pytest.mark.parametrize("segment_ids", (False, True))
  def test_processes_share_the_global_batch(self, split, count, segment_ids):
    for name in ("train", "validation"):
      self._write(name, np.arange(_NUM_ROWS * _LENGTH), separator_id=7)
    single = self._open(split, segment_ids=segment_ids).batches()
    several = [
      self._open(split, (p, count), segment_ids=segment_ids).batches()
      for p in range(count)
    ]
    seen = 0
    for batch in itertools.islice(single, 12):
      parts = [next(iterator) for iterator in several]
      assert parts[0]["tokens"].shape == (4 // count, _LENGTH + 1)
      names = ["counts"] + ["segment_ids"] * segment_ids + ["tokens"]
      assert sorted(batch) == names
      for key in batch:
        joined = np.concatenate([part[key] for part in parts])
        np.testing.assert_array_equal(joined, batch[key])
      seen += 1
    assert seen == (12 if split == "train" else 6)
    if split == "validation":
      for iterator in several:
        with pytest.raises(StopIteration):
          next(iterator)
    for iterator in (single, *several):
      iterator.close()

  @pytest.mark.parametrize("num_threads", [0, 1, 3])
  def test_the_number_of_threads_changes_nothing(self, num_threads):
    expected = self._open(num_threads=2)
    actual = self._open(num_threads=num_threads)
    assert actual.identity() == expected.identity()
    rows = self._rows(actual, 9)
    np.testing.assert_array_equal(rows, self._rows(expected, 9))

  def test_starting_much_later_is_as_quick(self):
    began = time.monotonic()
    self._rows(self._open(), 1, start=10**12)
    assert time.monotonic() - began < 5.0

  @pytest.mark.parametrize("split", ("train", "validation"))
  @pytest.mark.parametrize("before", (1, 2))
  @pytest.mark.parametrize("after", (1, 4))
  def test_the_state_resumes_on_any_number_of_processes(
    self, split, before, after
  ):
    iterator = self._open(split, (0, before)).batches()
    for _ in range(3):
      next(iterator)
    time.sleep(0.05)  # Rows that are read ahead do not count.
    state = json.loads(json.dumps(iterator.get_state()))
    iterator.close()
    assert state["next_batch"] == 3
    expected = self._rows(self._open(split), 2, start=3)
    resumed = []
    for process in range(after):
      iterator = self._open(split, (process, after)).batches()
      next(iterator)  # A position of its own, to be forgotten.
      iterator.set_state(state)
      assert iterator.get_state() == state
      rows = [next(iterator)["tokens"][:, 0] // _LENGTH for _ in range(2)]
      resumed.append(rows)
      iterator.close()
    np.testing.assert_array_equal(np.concatenate(resumed, axis=1), expected)

  @pytest.mark.parametrize(
    "fields,message",
    [
      ({"seed": 5}, r"seed \(saved 0, now 5\)"),
      ({"batch_size": 2}, r"batch_size \(saved 4, now 2\)"),
      ({"sequence_length": 3}, r"sequence_length \(saved 4, now 3\)"),
      ({"num_threads": 0}, r"content \(saved '\w+', now '\w+'\)"),
      ({}, r"content \(saved '\w+', now '\w+'\)"),
    ],
  )
  def test_a_state_of_other_data_is_refused(self, fields, message):
    iterator = self._open().batches()
    state = iterator.get_state()
    iterator.close()
    if fields in ({}, {"num_threads": 0}):
      more = {"separator_id": 7} if fields else {}
      self._write("train", np.arange(_NUM_ROWS * _LENGTH + 1)[::-1], **more)
    other = self._open(**fields).batches()
    with pytest.raises(ValueError, match=message):
      other.set_state(state)
    other.close()

  def test_validation_is_one_pass_in_a_fixed_mixed_order(self):
    dataset = self._open("validation")
    rows = self._rows(dataset, 100)
    assert rows.shape == (6, 4)
    assert sorted(rows.reshape(-1)) == [_PADDING, *range(_NUM_ROWS)]
    assert rows[-1, -1] == _PADDING
    assert dataset.num_batches == 6
    assert not np.array_equal(rows.reshape(-1), np.sort(rows, axis=None))
    for fields in ({}, {"seed": 9}):
      again = self._rows(self._open("validation", **fields), 100)
      np.testing.assert_array_equal(again, rows)

  @pytest.mark.parametrize(
    "fields,message",
    [
      ({"source": "webtext"}, "data.source: got 'webtext'.*jsonl, "),
      ({"path": "/nowhere"}, "data.path: got '/nowhere'"),
      ({"sequence_length": 93}, "length: got 93.*93 tokens to train on in /"),
      ({"seed": 2**32}, "data.seed"),
      ({"batch_size": 5}, "batch_size: got 5.*multiple of.*processes, 2"),
    ],
  )
  def test_bad_fields_are_named(self, fields, message):
    with pytest.raises(
      config_lib.ConfigError, match=f"^config.*{message}[^\n]*$"
    ):
      self._open(process=(0, 2), **fields)


class TestStdlibPipeline:
  """The defaults, end to end."""

  def test_every_document_is_in_one_split(self):
    config = config_lib.DataConfig(sequence_length=64)
    train = data.open_dataset(config, "train")
    validation = data.open_dataset(config, "validation")
    described = train.describe(), validation.describe()
    assert sum(d["split_bytes"] for d in described) == described[0]["bytes"]
    for dataset, facts in zip((train, validation), described):
      assert (
        dataset.num_tokens == facts["split_bytes"] + facts["split_documents"]
      )
      json.dumps(facts)
    first, second = (d["split_sha256"] for d in described)
    assert first != second
    assert 0.01 <= described[1]["split_bytes"] / described[0]["bytes"] <= 0.12

  def test_a_path_beside_the_embedded_corpus_is_refused(self):
    for name in ("path", "validation_path"):
      config = config_lib.DataConfig(**{name: "corpus.txt"})
      with pytest.raises(
        config_lib.ConfigError, match=f"data.{name}: got 'corpus.txt'.*stdlib"
      ):
        data.open_dataset(config, "train")

  def test_an_empty_split_is_named(self):
    config = config_lib.DataConfig(validation_fraction=1e-9)
    data.open_dataset(config, "train")
    with pytest.raises(
      config_lib.ConfigError, match="validation_fraction: got 1e-09.*validation"
    ):
      data.open_dataset(config, "validation")

  @pytest.mark.more
  def test_no_device_is_started(self):
    program = (
      "from attnres_jax import config, data\n"
      "c = config.DataConfig()\n"
      "d = data.open_dataset(c, 'train')\n"
      "i = d.batches(); next(i); i.close()\n"
      "from jax._src import xla_bridge\n"
      "assert not xla_bridge._backends, xla_bridge._backends\n"
      "import jax; jax.devices(); assert xla_bridge._backends\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
