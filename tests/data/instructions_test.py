# SPDX-License-Identifier: Apache-2.0
"""Instructions: whole examples in padded rows, and which tokens count."""

import json

import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.models import loss as loss_lib

SEPARATOR = 256


def _write(folder, examples):
  lines = [json.dumps(dict(prompt=p, completion=c)) for p, c in examples]
  path = folder / "data.jsonl"
  path.write_text("\n".join(lines) + "\n")
  return path


def _open(path, length=12, split="train", **fields):
  other = path.with_name("held_out.jsonl")
  other.write_text('{"prompt": "a", "completion": "b"}')
  config = config_lib.DataConfig(
    source="instructions", path=str(path), validation_path=str(other),
    sequence_length=length, batch_size=1, segment_ids=True, **fields,
  )  # fmt: skip
  return data.open_dataset(config, split)


def _rows(dataset, count):
  batches = dataset.batches()
  found = [next(batches) for _ in range(count)]
  batches.close()
  return [{name: a[0] for name, a in batch.items()} for batch in found]


def test_rows_by_hand(tmp_path):
  path = _write(tmp_path, [("ab", "xyz"), ("", "q"), ("abcd", "efgh")])
  dataset = _open(path)
  assert dataset.num_rows == 2 and dataset.num_tokens == 7 + 3 + 10
  first, second = sorted(_rows(dataset, 2), key=lambda r: -r["tokens"][3])
  s = SEPARATOR
  expected = [s, *b"ab", *b"xyz", s, s, *b"q", s, s, s, s]
  assert first["tokens"].tolist() == expected
  assert first["segment_ids"].tolist() == [1] * 7 + [2] * 3 + [0] * 3
  assert first["counts"].tolist() == [0] * 3 + [1] * 4 + [0] + [1] * 2 + [0] * 3
  assert second["tokens"].tolist() == [s, *b"abcd", *b"efgh", s, s, s, s]
  assert second["counts"].tolist() == [0] * 5 + [1] * 5 + [0] * 3
  # What is predicted: the completions, and where they end.
  examples = loss_lib.Examples.of({n: a[None] for n, a in first.items()})
  counted = np.asarray(examples.targets)[np.asarray(examples.weights) > 0]
  assert counted.tolist() == [*b"xyz", s, *b"q", s]


def test_validation_is_split_by_content_and_repeats(tmp_path):
  path = _write(tmp_path, [(f"p{i}", f"c{i}") for i in range(200)])
  config = config_lib.DataConfig(
    source="instructions", path=str(path), validation_fraction=0.25,
    sequence_length=16, batch_size=2, segment_ids=True,
  )  # fmt: skip
  seen = {}
  for split in ("train", "validation"):
    dataset = data.open_dataset(config, split)
    seen[split] = dataset.describe()
  counts = [one["split_documents"] for one in seen.values()]
  assert sum(counts) == 200 and 30 < counts[1] < 70
  assert len({one["fingerprint"] for one in seen.values()}) == 2


@pytest.mark.parametrize(
  "line,message",
  [
    ("{", "data.jsonl:2', expected a line of JSON"),
    ("[1]", "data.jsonl:2', expected an object with text in 'prompt'"),
    ('{"prompt": "a", "text": "b"}', "text in 'completion'; prompt, text"),
    ('{"prompt": "a", "completion": ""}', "'completion' that is not empty"),
    ('{"prompt": 1, "completion": "b"}', "text in 'prompt'"),
    (
      '{"prompt": "a", "completion": "bcdefghijkl"}',
      "data.sequence_length: got 12, expected at least 13, for the example at",
    ),
  ],
)
def test_bad_lines_are_named(line, message, tmp_path):
  path = _write(tmp_path, [("a", "b")])
  path.write_text(path.read_text() + line + "\n")
  with pytest.raises(config_lib.ConfigError, match=message):
    _open(path)


def test_documents_are_needed():
  with pytest.raises(config_lib.ConfigError, match="segment_ids: got False"):
    config_lib.DataConfig(source="instructions", path="x")
