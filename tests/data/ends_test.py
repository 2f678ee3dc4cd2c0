# SPDX-License-Identifier: Apache-2.0
"""A network that is trained on short documents ends its samples as they end."""

import json

import pytest

from attnres_jax.data import prepare
from tests import tiny_run
from tests.inference import texts

_ANSWERS = {"r": "ed", "g": "reen", "b": "lue", "v": "iolet"}
_SEPARATOR = 256


def _lines(folder, records):
  for name in ("train", "val"):
    lines = [json.dumps(record) for record in records] * 10
    (folder / f"{name}.jsonl").write_text("\n".join(lines))
  return str(folder)


def _texts(folder):
  records = [{"text": a + b} for a, b in _ANSWERS.items()]
  return {"data.source": "jsonl", "data.path": _lines(folder, records)}


def _segments(folder):
  return _texts(folder) | {"data.segment_ids": True}


def _token_files(folder):
  out = folder / "tokens"
  flags = ["--source=jsonl", f"--path={_texts(folder)['data.path']}"]
  assert prepare.main([*flags, f"--output={out}", "--shard_tokens=100"]) == 0
  return {"data.source": "tokens", "data.path": str(out)}


@pytest.mark.parametrize(
  "way",
  [
    _segments,
    pytest.param(_texts, marks=pytest.mark.slow),
    pytest.param(_token_files, marks=pytest.mark.slow),
  ],
)
def test_samples_end(way, tmp_path):
  (tmp_path / "data").mkdir()
  run = tmp_path / "run"
  fields = way(tmp_path / "data") | {
    "data.batch_size": 8, "optim.peak_lr": 1e-2, "train.steps": 80,
    "train.depth_every": 0, "train.eval_every": 0, "checkpoint.every_steps": 80,
  }  # fmt: skip
  tiny_run.train_here(run, fields)
  found = texts.drawn(run, list(_ANSWERS), 40)
  for (ids, text, finish), answer in zip(found, _ANSWERS.values(), strict=True):
    assert text == answer
    assert ids[-1] == _SEPARATOR and finish != "length"
