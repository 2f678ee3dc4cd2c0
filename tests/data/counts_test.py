# SPDX-License-Identifier: Apache-2.0
"""A run reads the text that its configuration names."""

import json

import pytest

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.train import loop
from tests.data import token_file


def _tokens(folder, count):
  for split in ("train", "validation"):
    token_file.write(folder / f"{split}.bin", [0] * count, vocab_size=300)
  return str(folder)


def _texts(path, count):
  lines = (json.dumps({"text": f"text {i}"}) for i in range(count))
  path.write_text("\n".join(lines))
  return str(path)


def test_counts_are_those_of_a_run(tmp_path):
  stdlib = config_lib.DataConfig()
  texts = config_lib.DataConfig(
    source="jsonl", path=_texts(tmp_path / "a.jsonl", 90), sequence_length=8
  )
  tokens = config_lib.DataConfig(
    source="tokens", tokenizer="ids", path=_tokens(tmp_path / "t", 1000)
  )
  for config in (stdlib, texts, tokens):
    opened = data.open_dataset(config, "train")
    counts = data.count_tokens(config)
    assert counts == opened.part_tokens == [opened.num_tokens]
    passes = data.epochs(config, counts, 2.5 * opened.num_tokens)
    assert passes == pytest.approx(2.5)


def test_counts_follow_the_files(tmp_path):
  path = _texts(tmp_path / "a.jsonl", 90)
  config = config_lib.DataConfig(source="jsonl", path=path)
  (before,) = data.count_tokens(config)
  _texts(tmp_path / "a.jsonl", 180)
  assert data.count_tokens(config)[0] > 1.9 * before


def test_the_path_that_a_mixture_reads_most_often(tmp_path):
  paths = (_tokens(tmp_path / "a", 1000), _tokens(tmp_path / "b", 100))
  config = config_lib.DataConfig(
    source="tokens", tokenizer="ids", paths=paths, weights=(0.8, 0.2),
    sequence_length=8,
  )  # fmt: skip
  counts = data.count_tokens(config)
  assert counts == data.open_dataset(config, "train").part_tokens == [1000, 100]
  assert data.epochs(config, counts, 1000) == pytest.approx(2.0)


@pytest.mark.parametrize(
  "fields, message",
  [
    ({"model.vocab_size": 163_840}, "model.vocab_size: got 163840, expected"),
    ({"train.steps": 200_000}, "data.max_epochs: got 4.0, expected at least"),
    ({"model.vocab_size": 1024}, None),
    ({"model.vocab_size": 163_840, "train.start_from": "runs/llama"}, None),
    ({"train.steps": 200_000, "data.max_epochs": 1e9}, None),
  ],
)
@pytest.mark.parametrize("offline", [False, True])
def test_runs_whose_text_does_not_fit_are_refused(fields, message, offline):
  config = config_lib.load_config("configs/lm.py:size=micro", fields)
  if message is None:
    data.check(config, offline=offline)
    return
  with pytest.raises(config_lib.ConfigError, match=message):
    data.check(config, offline=offline)


def test_a_run_checks_the_text_that_it_has_opened(tmp_path, monkeypatch):
  """It refuses before it compiles, and tokenises each split once."""
  path = _texts(tmp_path / "a.jsonl", 200)
  fields = {
    "data.source": "jsonl", "data.path": path, "data.validation_fraction": 0.3,
    "data.tokenizer": "bytes", "train.steps": 100,
  }  # fmt: skip
  config = config_lib.load_config("configs/lm.py:runlocal", fields)
  encoded = []
  encode_batch = data.make_tokenizer(config.data).encode_batch

  def counted(self, texts):
    encoded.extend(texts)
    return encode_batch(texts)

  monkeypatch.setattr(
    "attnres_jax.data.tokenizer.BytesTokenizer.encode_batch", counted
  )
  with pytest.raises(config_lib.ConfigError, match="data.max_epochs: got 4.0"):
    loop.train_and_evaluate(config, tmp_path / "run")
  assert len(encoded) == 200
  assert not (tmp_path / "run").exists()
