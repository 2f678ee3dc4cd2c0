# SPDX-License-Identifier: Apache-2.0
"""In transformers, a tokenizer of ours gives the ids of our prompts."""

import random

import pytest

from attnres_jax import config as config_lib
from attnres_jax.data import text_format as text_format_lib
from attnres_jax.interop import tokenizer_files
from tests.data import text_format_test


@pytest.mark.needs("transformers>=5")
@pytest.mark.parametrize("kind", ["bytes", *text_format_test.KINDS])
def test_ids_are_those_of_our_prompts(kind, tmp_path):
  import transformers

  config = config_lib.DataConfig()
  if kind != "bytes":
    path = tmp_path / "given.json"
    text_format_test.train(kind).save(str(path))
    config = config_lib.DataConfig(tokenizer="hf", tokenizer_path=str(path))
  text_format = text_format_lib.of_data(config)
  folder = tmp_path / "out"
  folder.mkdir()
  for name, content in tokenizer_files.of_run(config, text_format).items():
    (folder / name).write_bytes(content)
  theirs = transformers.AutoTokenizer.from_pretrained(folder)
  assert theirs.eos_token_id == theirs.bos_token_id == text_format.end_ids[0]
  rng = random.Random(0)
  texts = ["", "a </s><s> b <|endoftext|>"]
  texts += [text_format_test._text(rng) for _ in range(200)]
  for text in texts:
    assert theirs(text)["input_ids"] == text_format.prompt(text)


def test_token_ids_have_no_files():
  config = config_lib.DataConfig(tokenizer="ids")
  assert tokenizer_files.of_run(config, None) == {}
