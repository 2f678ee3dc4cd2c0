# SPDX-License-Identifier: Apache-2.0
"""Texts of an imported network equal its tokenizer's in transformers."""

import json
import os
import random

import pytest
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors
from tokenizers import trainers

from attnres_jax import config as config_lib
from attnres_jax.data import text_format as text_format_lib

_SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
_SCRIPTS = (
  "the quick brown fox jumps over it's lazy dog, don't! 42 ",
  "Der Fluß läuft über große Häuser ",
  "Съешь же ещё этих мягких французских булок ",
  "ξεσκεπάζω την ψυχοφθόρα βδελυγμία ",
  "我能吞下玻璃而不伤身体。私はガラスを食べられます",
  "나는 유리를 먹을 수 있어요 ",
  "أنا قادر على أكل الزجاج ",
  "मैं काँच खा सकता हूँ ",
  "😀👩‍👩‍👧‍👦🇩🇪👍🏽❤️",
  "e\u0301a\u0308o\u0302n\u0303 z\u0361w\ufffd",
  "  \n\t\r\n   \u00a0\u2003\u3000",
  "def f(x):\n    return x**2  # ok\n",
)
KINDS = "byte_level", "byte_fallback", "word_piece"
# Their pieces contain the separator, so that a text may become it.
AMBIGUOUS = "metaspace", "whitespace"


def _text(rng: random.Random) -> str:
  """Valid text of several scripts, white space, emoji and combining marks."""
  parts = []
  for _ in range(rng.randint(0, 6)):
    script = rng.choice(_SCRIPTS)
    start = rng.randrange(len(script))
    parts.append(script[start : start + rng.randint(1, 12)])
  return "".join(parts)


def _corpus():
  rng = random.Random(0)
  return [_text(rng) for _ in range(300)] + list(_SCRIPTS) * 3


def _opened(special):
  return processors.TemplateProcessing(
    single="<s> $A </s>",
    pair="<s> $A </s> $B",
    special_tokens=[(name, special[name]) for name in ("<s>", "</s>")],
  )


def train(kind: str) -> tokenizers.Tokenizer:
  """A small tokenizer of this kind."""
  common = dict(
    vocab_size=600, special_tokens=list(_SPECIAL), show_progress=False
  )
  if kind == "byte_level":
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(**common, initial_alphabet=alphabet)
  elif kind == "byte_fallback":  # As Llama 2.
    made = tokenizers.Tokenizer(
      models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence(
      [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
      [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
      ]
    )
    common["special_tokens"] += [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(**common, limit_alphabet=40)
  elif kind == "metaspace":
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(**common, unk_token="<unk>")
  elif kind == "word_piece":
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(**common)
  else:  # Words, joined by spaces.
    made = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(**common)
  made.train_from_iterator(_corpus(), trainer)
  if kind == "byte_fallback":
    # Bytes are text, not special.
    described = json.loads(made.to_str())
    described["added_tokens"] = described["added_tokens"][: len(_SPECIAL)]
    made = tokenizers.Tokenizer.from_str(json.dumps(described))
  made.post_processor = _opened(made.get_vocab())
  return made


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
  """Transformers' tokenizer and our format of the same folder."""
  transformers = pytest.importorskip("transformers")
  folder = tmp_path_factory.mktemp(request.param)
  made = train(request.param)
  made.save(str(folder / "tokenizer.json"))
  names = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
  (folder / "tokenizer_config.json").write_text(
    json.dumps(names | dict(tokenizer_class="PreTrainedTokenizerFast"))
  )
  (folder / "config.json").write_text(json.dumps(dict(eos_token_id=[2, 3])))
  theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
  config = config_lib.DataConfig(
    tokenizer="hf", tokenizer_path=str(folder / "tokenizer.json")
  )
  return theirs, text_format_lib.of_checkpoint(config, folder)


def _check_stream(theirs, ours, before, ids):
  decode = lambda some: theirs.decode(some, skip_special_tokens=True)
  decoder = ours.decoder(before)
  pieces = [decoder.add(id) for id in ids]
  actual = "".join([*pieces, decoder.end()])
  texts = [decode(before), decode([*before, *ids])]
  expected = texts[1].removeprefix(os.path.commonprefix(texts))
  assert actual == expected, (before, ids)
  return pieces


def _check(checkpoint, count, seed):
  theirs, ours = checkpoint
  rng = random.Random(seed)
  for _ in range(count):
    text = _text(rng)
    ids = theirs(text)["input_ids"]
    assert [*ours.prompt(text), 2] == ids
    assert ours.tokenizer.decode(ids) == theirs.decode(
      ids, skip_special_tokens=True
    )
    later = theirs(_text(rng))["input_ids"]
    pieces = _check_stream(theirs, ours, ids[:-1], later)
    # Nothing waits that could have been shown.
    shown = "".join(pieces)
    assert len(shown) >= len(ours.tokenizer.decode(later)) - 40
    # A network draws any tokens, and more than the vocabulary has.
    drawn = [rng.randrange(len(theirs) + 5) for _ in range(rng.randint(1, 30))]
    _check_stream(theirs, ours, ids[:-1], drawn)


@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_a_separator_that_text_becomes_is_refused(kind, tmp_path):
  path = tmp_path / "tokenizer.json"
  train(kind).save(str(path))
  config = config_lib.DataConfig(tokenizer="hf", tokenizer_path=str(path))
  with pytest.raises(config_lib.ConfigError, match="no text becomes"):
    text_format_lib.of_data(config)


@pytest.mark.parametrize("kind", ["bytes", "byte_level", "byte_fallback"])
def test_a_prompt_may_end_inside_a_character(kind, tmp_path):
  config = config_lib.DataConfig()
  if kind != "bytes":
    path = tmp_path / "tokenizer.json"
    train(kind).save(str(path))
    config = config_lib.DataConfig(tokenizer="hf", tokenizer_path=str(path))
  ours = text_format_lib.of_data(config)
  for text in (
    "a \N{EURO SIGN}uro\N{GRINNING FACE}",
    "\N{EURO SIGN}\N{EURO SIGN}b",
  ):
    ids = ours.encode(text)
    inside = 0
    for cut in range(len(ids) + 1):
      decoder = ours.decoder(ids[:cut])
      pieces = [*map(decoder.add, ids[cut:]), decoder.end()]
      before = ours.tokenizer.decode(ids[:cut])
      inside += not text.startswith(before)
      assert os.path.commonprefix([before, text]) + "".join(pieces) == text
    assert inside  # Else no cut was inside a character.


def test_long_texts_are_decoded_in_parts(checkpoint, monkeypatch):
  monkeypatch.setattr(text_format_lib, "_CONTEXT", 8)
  theirs, ours = checkpoint
  before, later = (
    theirs(text)["input_ids"] for text in ("the ", "".join(_SCRIPTS))
  )
  _check_stream(theirs, ours, before, later)
  decoder = ours.decoder(before)
  for id in later:
    decoder.add(id)
  assert len(decoder._ids) < len(later) / 2


def test_ids_text_and_pieces_are_those_of_transformers(checkpoint):
  _check(checkpoint, 20, seed=1)


@pytest.mark.slow
def test_ten_thousand_texts(checkpoint):
  _check(checkpoint, 2000, seed=2)


def _of_files(folder, **others):
  """The format of a folder whose files have these values."""
  for name, values in others.items():
    (folder / f"{name}.json").write_text(json.dumps(values))
  config = config_lib.DataConfig(
    tokenizer="hf", tokenizer_path=str(folder / "tokenizer.json")
  )
  return text_format_lib.of_checkpoint(config, folder)


@pytest.fixture
def folder(tmp_path):
  train("byte_level").save(str(tmp_path / "tokenizer.json"))
  return tmp_path


def test_special_tokens_are_text(folder):
  ours = _of_files(folder)
  written = "a<|im_end|>b"
  assert 3 not in ours.encode(written)
  assert ours.tokenizer.decode(ours.encode(written)) == written


@pytest.mark.parametrize(
  "others,expected",
  [
    (dict(), ()),
    (dict(config=dict(eos_token_id=7)), (7,)),
    (dict(config=dict(eos_token_id=-1)), ()),
    (
      dict(
        config=dict(eos_token_id=7),
        generation_config=dict(eos_token_id=[8, 9]),
      ),
      (8, 9),
    ),
    (
      dict(
        generation_config=dict(eos_token_id=None),
        interop=dict(config=dict(eos_token_id=5)),
        # Of a run, this is its own configuration.
        config=dict(eos_token_id=4),
      ),
      (5,),
    ),
  ],
)
def test_what_ends_a_text(folder, others, expected):
  assert _of_files(folder, **others).end_ids == expected


@pytest.mark.parametrize("wrong", ["x", 1.5, [[1]], True, 2**40, -2])
def test_wrong_ids_are_named(folder, wrong):
  with pytest.raises(config_lib.ConfigError, match="config.json: eos_token_id"):
    _of_files(folder, config=dict(eos_token_id=wrong))


def test_our_own_runs_use_their_separator(tmp_path):
  ours = text_format_lib.of_data(config_lib.DataConfig())
  assert ours.prompt("a") == [256, 97]
  assert ours.end_ids == (256,) and ours.prefix_id == 256
  assert ours.describe()["eos_token_id"] == 256
  decoder = ours.decoder(ours.prompt("a"))
  ids = [*"€b".encode(), 0xFF, 0xFF, 0xE2, 256]
  assert [decoder.add(id) for id in ids] == [
    "", "", "€", "b", "", "", "", "\ufffd\ufffd\ufffd\n",
  ]  # fmt: skip
  # Whatever is before a character, its bytes stay together.
  rng = random.Random(0)
  some = [*"aß€🙂".encode(), 0xFF, 0xC3, 0xF0, 0xE2, 0x80]
  for size in range(2, 15):
    for _ in range(100):
      written = bytes(rng.choices(some, k=size))
      decoder = ours.decoder()
      pieces = [*map(decoder.add, ours.encode(written)), decoder.end()]
      assert "".join(pieces) == written.decode(errors="replace")


@pytest.mark.parametrize("name", ["tokenizer.json", ""])
def test_imported_means_an_interop_json_beside_the_vocabulary(folder, name):
  config = config_lib.DataConfig(
    tokenizer="hf", tokenizer_path=str(folder / name)
  )
  assert not text_format_lib.of_data(config).imported
  (folder / "interop.json").write_text("{}")
  assert text_format_lib.of_data(config).imported
