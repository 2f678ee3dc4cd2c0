# SPDX-License-Identifier: Apache-2.0
"""In transformers, a tokenizer of ours gives the ids of our prompts."""

import json
import random
import unicodedata

import pytest
import sentencepiece

from attnres_jax import config as config_lib
from attnres_jax.data import text_format as text_format_lib
from attnres_jax.interop import tokenizer_files
from tests.data import text_format_test

SPECIAL = "a </s><s> b <|endoftext|>"
# Options of SentencePiece's trainer.
MODELS = {
  "unigram": dict(),
  "identity": dict(normalization_rule_name="identity"),
  "without_prefix": dict(add_dummy_prefix=False),
  "spaces": dict(
    normalization_rule_name="identity", remove_extra_whitespaces=False
  ),
  "without_ends": dict(bos_id=-1, eos_id=-1),
  "bpe": dict(model_type="bpe"),
  "bpe_spaces": dict(
    model_type="bpe", normalization_rule_name="identity",
    remove_extra_whitespaces=False,
  ),
}  # fmt: skip


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


def _check(text_format, theirs, texts, with_text=False):
  """Ids of texts and, if none is unknown, the text of these ids."""
  for text in texts:
    ids = theirs(text)["input_ids"]
    assert ids == text_format.prompt(text), text
    if with_text:
      shown = theirs.decode(ids, skip_special_tokens=True)
      assert shown == text_format.decode(ids[1:]), text


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


def _loses_marks(text):
  """Whether a combining mark follows a character that is normalised.

  The tokenizers library (0.23) drops the mark, the SentencePiece library keeps
  it.
  """
  marks = "Mn", "Mc", "Me", "Cf"
  return any(
    unicodedata.category(b) in marks
    and (a.isspace() or a == "\ufffd" or unicodedata.normalize("NFKC", a) != a)
    for a, b in zip(text, text[1:])
  )


def _check_model(tmp_path, options, count):
  prefix = tmp_path / "tokenizer"
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(text_format_test._corpus()),
    model_prefix=str(prefix),
    character_coverage=0.98,
    minloglevel=2,
    **options,
  )
  config = config_lib.DataConfig(
    tokenizer="sentencepiece", tokenizer_path=f"{prefix}.model"
  )
  text_format, theirs = _exported(config, tmp_path / "out")
  texts = _texts(count)
  if options.get("model_type") != "bpe":
    # A Unigram model of the tokenizers library reads control pieces in a text.
    texts.remove(SPECIAL)
  if "normalization_rule_name" not in options:
    texts = [text for text in texts if not _loses_marks(text)]
  assert len(texts) > 0.85 * count
  _check(text_format, theirs, texts, with_text=options["byte_fallback"])


@pytest.mark.needs("transformers>=5")
@pytest.mark.parametrize("byte_fallback", [False, True])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
  "count", [200, pytest.param(1000, marks=pytest.mark.slow)]
)
def test_ids_of_a_sentencepiece_model(count, kind, byte_fallback, tmp_path):
  size = 800 if byte_fallback else 500
  options = dict(byte_fallback=byte_fallback, vocab_size=size) | MODELS[kind]
  options["hard_vocab_limit"] = "model_type" in options
  _check_model(tmp_path, options, count)


def test_token_ids_have_no_files():
  config = config_lib.DataConfig(tokenizer="ids")
  assert tokenizer_files.of_run(config, None) == {}
