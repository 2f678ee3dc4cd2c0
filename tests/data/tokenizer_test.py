# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, with vocabularies trained here on a few sentences."""

import hashlib
import io
import pathlib
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import data

_TEXTS = (
  "the residual stream adds every output to one sum",
  "attention over depth chooses among the outputs instead",
  "a query per sublayer, a softmax over the sources, one mixture",
)


def _train_hf(path, special=("<|endoftext|>",)):
  tokenizers = pytest.importorskip("tokenizers")
  model = tokenizers.Tokenizer(tokenizers.models.BPE())
  model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  model.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=list(special),
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  model.train_from_iterator(_TEXTS, trainer)
  model.enable_truncation(4)
  model.save(str(path))
  return model


def _train_sentencepiece(path, **options):
  sentencepiece = pytest.importorskip("sentencepiece")
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(_TEXTS),
    model_writer=model,
    vocab_size=300,
    byte_fallback=True,
    hard_vocab_limit=False,
    minloglevel=2,
    **options,
  )
  path.write_bytes(model.getvalue())


class BytesTokenizerTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.tokenizer = data.make_tokenizer(config_lib.DataConfig())

  def test_round_trip(self):
    for text in ("", "def f():\n\treturn 'ü€😀'\0"):
      ids = self.tokenizer.encode(text)
      self.assertEqual(ids.tolist(), list(text.encode()))
      self.assertEqual(self.tokenizer.encode(text.encode()).tolist(), list(ids))
      self.assertEqual(self.tokenizer.decode(ids), text)
    self.assertEqual(ids.dtype, np.int32)

  def test_every_id_has_a_text(self):
    self.assertEqual(self.tokenizer.vocab_size, 257)
    self.assertEqual(self.tokenizer.separator_id, 256)
    self.assertEqual(self.tokenizer.decode([97, 256, 98]), "a\nb")
    # A character cut off, a byte no text holds, ids of a padded vocabulary.
    for ids in ([0xC3], [0xFF], [257], [300], [-1]):
      self.assertEqual(self.tokenizer.decode([97, *ids, 98]), "a\ufffdb")


class VocabularyFileTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.path = self.folder / "vocabulary"

  def _make(self, name):
    return data.make_tokenizer(
      config_lib.DataConfig(tokenizer=name, tokenizer_path=str(self.path))
    )

  @parameterized.parameters("hf", "sentencepiece")
  def test_round_trip_and_sizes(self, name):
    train = {"hf": _train_hf, "sentencepiece": _train_sentencepiece}[name]
    train(self.path)
    tokenizer = self._make(name)
    texts = [*_TEXTS, "unseen: ü€😀", ""]
    batch = tokenizer.encode_batch([text.encode() for text in texts])
    for text, ids in zip(texts, batch, strict=True):
      self.assertEqual(tokenizer.decode(ids), text)
      np.testing.assert_array_equal(tokenizer.encode(text), ids)
      self.assertEqual(ids.dtype, np.int32)
      self.assertNotIn(tokenizer.separator_id, ids)
      self.assertTrue(all(0 <= i < tokenizer.vocab_size for i in ids))
    # Merges are used, or there would be as many ids as characters.
    self.assertLess(len(batch[0]), len(texts[0]) * 0.8)
    self.assertEqual(
      tokenizer.describe(),
      {
        "name": name,
        "vocab_size": tokenizer.vocab_size,
        "separator_id": tokenizer.separator_id,
        "sha256": hashlib.sha256(self.path.read_bytes()).hexdigest(),
      },
    )

  @parameterized.parameters("hf", "sentencepiece")
  def test_every_id_has_a_text(self, name):
    train = {"hf": _train_hf, "sentencepiece": _train_sentencepiece}[name]
    train(self.path)
    tokenizer = self._make(name)
    # SentencePiece puts a mark of a word's beginning first.
    a, b = (int(tokenizer.encode(text)[-1]) for text in "ab")
    shown = tokenizer.decode([a, tokenizer.separator_id, b])
    self.assertEqual(shown, "a\nb")
    shown = tokenizer.decode([a, tokenizer.vocab_size + 5, b, -1])
    self.assertEqual(shown, "a\ufffdb\ufffd")
    for i in range(tokenizer.vocab_size):
      self.assertIsInstance(tokenizer.decode([i]), str)

  def test_hf_separator(self):
    _train_hf(self.path)
    tokenizer = self._make("hf")
    self.assertEqual(tokenizer.separator_id, 0)
    self.assertLess(tokenizer.separator_id, tokenizer.vocab_size)
    # Its name in a text is text: a document cannot end itself.
    ids = tokenizer.encode("a<|endoftext|>b")
    self.assertNotIn(0, ids)
    self.assertEqual(tokenizer.decode(ids), "a<|endoftext|>b")

  def test_hf_without_a_separator_gets_a_new_id(self):
    model = _train_hf(self.path, special=())
    tokenizer = self._make("hf")
    self.assertEqual(tokenizer.separator_id, model.get_vocab_size())
    self.assertEqual(tokenizer.vocab_size, model.get_vocab_size() + 1)

  def test_sentencepiece_separators(self):
    _train_sentencepiece(self.path)
    self.assertEqual(self._make("sentencepiece").separator_id, 1)
    _train_sentencepiece(self.path, bos_id=-1, eos_id=-1)
    tokenizer = self._make("sentencepiece")
    self.assertEqual(tokenizer.separator_id, tokenizer.vocab_size - 1)

  @parameterized.parameters("hf", "sentencepiece")
  def test_bad_files_are_named(self, name):
    with self.assertRaisesRegex(
      config_lib.ConfigError, "data.tokenizer_path: got .*an existing file"
    ):
      self._make(name)
    self.path.write_bytes(b"neither")
    with self.assertRaisesRegex(
      config_lib.ConfigError, "data.tokenizer_path: got '.*vocabulary'"
    ):
      self._make(name)

  @parameterized.parameters(("hf", "tokenizers"), ("sentencepiece",) * 2)
  def test_missing_library_says_what_to_install(self, name, package):
    self.path.write_bytes(b"")
    with pytest.MonkeyPatch.context() as patch:
      patch.setitem(sys.modules, package, None)
      with self.assertRaisesRegex(ImportError, r'pip install ".*\[hf\]"'):
        self._make(name)

  def test_unknown_names_are_refused(self):
    with self.assertRaisesRegex(
      config_lib.ConfigError, "data.tokenizer: got 'bpe'.*bytes, hf, ids"
    ):
      data.make_tokenizer(
        config_lib.DataConfig(tokenizer="bpe", tokenizer_path="x")
      )
    with self.assertRaisesRegex(config_lib.ConfigError, "data.tokenizer"):
      data.make_tokenizer(config_lib.DataConfig(tokenizer="ids"))


if __name__ == "__main__":
  absltest.main()
