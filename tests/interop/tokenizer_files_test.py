# SPDX-License-Identifier: Apache-2.0
"""In transformers, a tokenizer of ours gives the ids of our prompts."""

import json
import random

import pytest

from attnres_jax import config as config_lib
from attnres_jax.data import text_format as text_format_lib
from attnres_jax.interop import tokenizer_files
from tests.data import text_format_test

SPECIAL = "a </s><s> b <|endoftext|>"


def _exported(config, folder):
  """Our format, and what AutoTokenizer finds in an exported folder."""
  import transformers

  text_format = text_format_lib.of_data(config)
  folder.mkdir()
  for name, content in tokenizer_files.of_run(config, text_format).items():
    (folder / name).write_bytes(content)
  # Otherwise it would choose a class by the family of the network.
  (folder / "config.json").write_text(json.dumps(dict(model_type="llama")))
  theirs = transformers.AutoTokenizer.from_pretrained(folder)
  assert theirs.eos_token_id == theirs.bos_token_id == text_format.end_ids[0]
  return text_format, theirs


def _texts(count):
  rng = random.Random(0)
  return ["", SPECIAL] + [text_format_test._text(rng) for _ in range(count)]


def _check(text_format, theirs, texts):
  for text in texts:
    assert theirs(text)["input_ids"] == text_format.prompt(text), text


@pytest.mark.needs("transformers>=5")
@pytest.mark.parametrize("kind", ["bytes", *text_format_test.KINDS])
def test_ids_are_those_of_our_prompts(kind, tmp_path):
  config = config_lib.DataConfig()
  if kind != "bytes":
    path = tmp_path / "tokenizer.json"
    text_format_test.train(kind).save(str(path))
    # A folder stands for its tokenizer.json.
    config = config_lib.DataConfig(tokenizer="hf", tokenizer_path=str(tmp_path))
  _check(*_exported(config, tmp_path / "out"), _texts(200))


def test_token_ids_have_no_files():
  config = config_lib.DataConfig(tokenizer="ids")
  assert tokenizer_files.of_run(config, None) == {}
