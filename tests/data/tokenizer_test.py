# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, with vocabularies trained here on a few sentences."""

import hashlib
import json
import sys

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


class TestBytesTokenizer:
  @pytest.fixture(autouse=True)
  def set_up(self):
    self.tokenizer = data.make_tokenizer(config_lib.DataConfig())

  def test_round_trip(self):
    for text in ("", "def f():\n\treturn 'ü€😀'\0"):
      ids = self.tokenizer.encode(text)
      assert ids.tolist() == list(text.encode())
      assert self.tokenizer.encode(text.encode()).tolist() == list(ids)
      assert self.tokenizer.decode(ids) == text
    assert ids.dtype == np.int32

  def test_every_id_has_a_text(self):
    assert self.tokenizer.vocab_size == 257
    assert self.tokenizer.separator_id == 256
    assert self.tokenizer.decode([97, 256, 98]) == "a\nb"
    # A character cut off, a byte no text holds, ids of a padded vocabulary.
    for ids in ([0xC3], [0xFF], [257], [300], [-1]):
      assert self.tokenizer.decode([97, *ids, 98]) == "a\ufffdb"


class TestVocabularyFile:
  @pytest.fixture(autouse=True)
  def set_up(self, tmp_path):
    self.folder = tmp_path
    self.path = self.folder / "vocabulary"

  def _make(self, name):
    return data.make_tokenizer(
      config_lib.DataConfig(tokenizer=name, tokenizer_path=str(self.path))
    )

  def test_round_trip_and_sizes(self):
    _train_hf(self.path)
    tokenizer = self._make("hf")
    texts = [*_TEXTS, "unseen: ü€😀", ""]
    batch = tokenizer.encode_batch([text.encode() for text in texts])
    for text, ids in zip(texts, batch, strict=True):
      assert tokenizer.decode(ids) == text
      np.testing.assert_array_equal(tokenizer.encode(text), ids)
      assert ids.dtype == np.int32
      assert tokenizer.separator_id not in ids
      assert all(0 <= i < tokenizer.vocab_size for i in ids)
    # Merges are used, or there would be as many ids as characters.
    assert len(batch[0]) < len(texts[0]) * 0.8
    assert tokenizer.describe() == {
      "name": "hf",
      "vocab_size": tokenizer.vocab_size,
      "separator_id": tokenizer.separator_id,
      "sha256": hashlib.sha256(self.path.read_bytes()).hexdigest(),
    }

  def test_every_id_has_a_text(self):
    _train_hf(self.path)
    tokenizer = self._make("hf")
    a, b = (int(tokenizer.encode(text)[-1]) for text in "ab")
    shown = tokenizer.decode([a, tokenizer.separator_id, b])
    assert shown == "a\nb"
    shown = tokenizer.decode([a, tokenizer.vocab_size + 5, b, -1])
    assert shown == "a\ufffdb\ufffd"
    for i in range(tokenizer.vocab_size):
      assert isinstance(tokenizer.decode([i]), str)

  def test_hf_separator(self):
    _train_hf(self.path)
    tokenizer = self._make("hf")
    assert tokenizer.separator_id == 0
    # Its name in a text is plain text: a document cannot end itself.
    ids = tokenizer.encode("a<|endoftext|>b")
    assert 0 not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"

  @pytest.mark.parametrize("special", [True, False])
  def test_a_separator_that_the_file_does_not_call_special(self, special):
    tokenizers = pytest.importorskip("tokenizers")
    model = _train_hf(self.path, special=())
    name = tokenizers.AddedToken("<eos>", special=special, normalized=False)
    model.add_tokens([name])
    model.save(str(self.path))
    tokenizer = self._make("hf")
    assert tokenizer.separator_id == model.token_to_id("<eos>")
    for text in ("<eos>", "a<eos>b", "a <eos> b <eos>\n"):
      ids = tokenizer.encode(text)
      assert tokenizer.separator_id not in ids
      assert tokenizer.decode(ids) == text

  def test_a_separator_that_is_also_a_word_is_refused(self):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "a": 1, "<s>": 2, "</s>": 3, "END": 4}
    model = tokenizers.Tokenizer(
      tokenizers.models.WordLevel(words, unk_token="[UNK]")
    )
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.save(str(self.path))
    for separator in ("", "END"):
      config = config_lib.DataConfig(
        tokenizer="hf", tokenizer_path=str(self.path), separator=separator
      )
      with pytest.raises(config_lib.ConfigError, match="^config.data.separato"):
        data.make_tokenizer(config)
    # The next of the usual names is taken, if that one is no word.
    del words["<s>"], words["</s>"]
    model.model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    model.add_special_tokens(["<bos>"])
    model.save(str(self.path))
    tokenizer = self._make("hf")
    assert tokenizer.separator_id == model.token_to_id("<bos>")

  def test_random_ids_are_refused(self):
    _train_hf(self.path)
    content = json.loads(self.path.read_text())
    content["model"]["dropout"] = 0.1
    self.path.write_text(json.dumps(content))
    with pytest.raises(config_lib.ConfigError, match="tokenizer_path.*dropout"):
      self._make("hf")

  def test_a_panic_of_the_library_names_the_file(self, monkeypatch):
    _train_hf(self.path)
    tokenizer = self._make("hf")
    PanicException = type("PanicException", (BaseException,), {})

    class Exploding:
      def encode_batch(self, *args, **kwargs):
        raise PanicException("a regular expression")

    monkeypatch.setattr(tokenizer, "_tokenizer", Exploding())
    with pytest.raises(config_lib.ConfigError, match="tokenizer_path.*a regul"):
      tokenizer.encode("a")

  @pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
  def test_a_pattern_that_explodes_names_the_file(self, part):
    _train_hf(self.path)
    content = json.loads(self.path.read_text())
    pattern = {"pattern": {"Regex": "(a|aa)+$"}}
    content["pre_tokenizer"] = None
    content[part] = (
      pattern
      | {
        "pre_tokenizer": dict(type="Split", behavior="Isolated", invert=False),
        "normalizer": dict(type="Replace", content="x"),
      }[part]
    )
    self.path.write_text(json.dumps(content))
    with pytest.raises(config_lib.ConfigError, match="tokenizer_path.*encode"):
      self._make("hf").encode("a" * 200 + "b")

  def test_hf_without_a_separator_gets_a_new_id(self):
    model = _train_hf(self.path, special=())
    tokenizer = self._make("hf")
    assert tokenizer.separator_id == model.get_vocab_size()
    assert tokenizer.vocab_size == model.get_vocab_size() + 1

  def test_bad_files_are_named(self):
    field = "data.tokenizer_path: got"
    with pytest.raises(config_lib.ConfigError, match=f"{field} .*an existing"):
      self._make("hf")
    self.path.write_bytes(b"neither")
    with pytest.raises(config_lib.ConfigError, match=f"{field} '.*vocabulary'"):
      self._make("hf")

  def test_missing_library_says_what_to_install(self, monkeypatch):
    self.path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r'pip install ".*\[hf\]"'):
      self._make("hf")

  def test_unknown_names_are_refused(self):
    for name, message in (
      ("bpe", "got 'bpe'.*bytes, hf, ids"),
      ("ids", "got"),
    ):
      with pytest.raises(config_lib.ConfigError, match=f"tokenizer: {message}"):
        data.make_tokenizer(config_lib.DataConfig(tokenizer=name))
