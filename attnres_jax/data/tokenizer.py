# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: bytes by default, or a vocabulary file of the user.

Every tokenizer has one separator, `separator_id`. It opens every document and,
as what a network learns to predict after the last token of a document, ends it:
begin-of-text and end-of-text of our own networks are this token. It is the
prompt of an unconditional sample, a sample ends where it is drawn, and packing
recognises documents by it. Decoding shows it as a line break.
"""

import abc
from collections.abc import Iterable, Iterator, Sequence
import contextlib
import hashlib
import os
import re
from typing import Any, NoReturn

import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import files as files_lib
from attnres_jax.config import fields
from attnres_jax.data import paths
from attnres_jax.data import token_files

# The largest id that a network can have.
_MOST_IDS = (1 << 31) - 1
# Usual names of the token between documents, in order of preference.
_SEPARATOR_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "</s>", "<eos>",
    "<s>", "<bos>",
)  # fmt: skip


class Tokenizer(abc.ABC):
  """Text to ids and back.

  Attributes:
    name: its key in `TOKENIZERS`.
    vocab_size: one more than the largest id.
    separator_id: opens and ends every document.
    has_separator: whether it does; else, token files name none.
    sha256: of the vocabulary file, if there is one.
    run_ids: tokens for single bytes that are decoded together: a byte that is
      not UTF-8 makes all neighbouring bytes unreadable.
  """

  name: str
  vocab_size: int
  separator_id: int
  has_separator: bool = True
  sha256: str | None = None
  run_ids: frozenset[int] = frozenset()

  def encode(self, text: str | bytes) -> np.ndarray:
    """Ids of a text, int32, without any separator; special tokens are text."""
    text = text.encode() if isinstance(text, str) else text
    return self.encode_batch([text])[0]

  @abc.abstractmethod
  def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    """`encode` of each text, on several threads if the library supports it."""

  @abc.abstractmethod
  def decode(self, ids: Iterable[int]) -> str:
    """The text of ids; never fails: an id without text becomes U+FFFD."""

  def skips(self, id: int) -> bool:
    """Whether `decode` leaves an id out, as imported tokenizers do."""
    del id
    return False

  def show_id(self, id: int) -> str:
    """An id for an error, with the token's name in the vocabulary."""
    return f"id {id}"

  def describe(self) -> dict[str, Any]:
    """Name, sizes and the hash of the vocabulary file, for JSON."""
    return {
      "name": self.name,
      "vocab_size": self.vocab_size,
      "separator_id": self.separator_id,
    } | ({"sha256": self.sha256} if self.sha256 else {})


class BytesTokenizer(Tokenizer):
  """256 byte values and a separator: no vocabulary file, any text."""

  name = "bytes"
  vocab_size = config_lib.BYTE_VOCAB_SIZE
  separator_id = 256

  def __init__(self, config: config_lib.DataConfig):
    del config

  def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    return [np.frombuffer(text, np.uint8).astype(np.int32) for text in texts]

  def decode(self, ids: Iterable[int]) -> str:
    """Bytes that are not UTF-8, as in a truncated character, become U+FFFD."""
    ids = np.asarray(list(ids), np.int64)
    shown = np.where(ids == self.separator_id, ord("\n"), ids)
    # 0xFF never occurs in UTF-8 text.
    shown = np.where((shown >= 0) & (shown < 256), shown, 0xFF)
    return shown.astype(np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer(Tokenizer):
  """A `tokenizer.json` of the Hugging Face `tokenizers` library.

  The separator is the first of the usual names that is in the vocabulary, else
  a new id after the last. It is special, whatever the file says. Special tokens
  that appear in a text are treated as text.
  """

  name = "hf"

  def __init__(self, config: config_lib.DataConfig):
    self._config = config
    tokenizers = paths.library("tokenizers", "data.tokenizer", "hf", "hf")
    path, self.sha256 = vocabulary_file(config)
    with self._expecting("a tokenizer.json of Hugging Face tokenizers"):
      self._tokenizer = tokenizers.Tokenizer.from_file(path)
    dropout = getattr(self._tokenizer.model, "dropout", None)
    if dropout:
      self._fail("a tokenizer whose ids are not random", f"dropout {dropout}")
    # Limits of a training recipe must not truncate texts.
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    self._tokenizer.encode_special_tokens = True
    ids = self._tokenizer.get_vocab(with_added_tokens=True)
    num_ids = max(ids.values(), default=-1) + 1
    if not 0 < num_ids < _MOST_IDS:
      accepted = f"a tokenizer with a vocabulary of 1 to {_MOST_IDS - 1} ids"
      self._fail(accepted, f"it has {num_ids}")
    if config.separator and config.separator not in ids:
      config_lib.fail(
        "data.separator",
        config.separator,
        f"a special token of {config.tokenizer_path}, or nothing",
      )
    names = [config.separator] if config.separator else _SEPARATOR_NAMES
    texts = [name for name in names if name in ids]
    usable = (ids[name] for name in texts if self._is_no_text(name, ids[name]))
    self.separator_id = next(usable, num_ids)
    if texts and self.separator_id == num_ids:
      config_lib.fail(
        "data.separator",
        config.separator or texts[0],
        "a token that no text becomes (this tokenizer reads the same text as"
        " the token)",
      )
    self.vocab_size = max(num_ids, self.separator_id + 1)
    decoder = self._tokenizer.decoder
    if decoder is not None and b'"ByteFallback"' in decoder.__getstate__():
      # Such as <0x0A>.
      self.run_ids = frozenset(
        id
        for token, id in ids.items()
        if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token)
      )

  def _is_no_text(self, name: str, id: int) -> bool:
    """Makes a token special; returns whether no text is encoded to its id."""
    self._tokenizer.add_special_tokens([name])
    texts = [name, f"a{name}a", f"a {name} a", f"{name}\n{name}"]
    encoded = self.encode_batch([text.encode() for text in texts])
    return not any(id in ids for ids in encoded)

  def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    # Fails, for example, for a vocabulary without its [UNK].
    with self._expecting("a tokenizer that can encode the text"):
      encodings = self._tokenizer.encode_batch(
        [text.decode(errors="replace") for text in texts],
        add_special_tokens=False,
      )
    return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

  def show_id(self, id: int) -> str:
    token = self._tokenizer.id_to_token(id)
    return f"id {id}" + (f" ({token})" if token else "")

  def decode(self, ids: Iterable[int]) -> str:
    shown, run = [], []
    for id in map(int, ids):
      # Negative ids overflow inside the library.
      has_text = id >= 0 and self._tokenizer.id_to_token(id) is not None
      if has_text and id != self.separator_id:
        run.append(id)
        continue
      shown.append(self._decode(run))
      shown.append("\n" if id == self.separator_id else "\ufffd")
      run = []
    shown.append(self._decode(run))
    return "".join(shown)

  def _decode(self, ids: Sequence[int]) -> str:
    with self._expecting("a tokenizer that can decode ids"):
      return self._tokenizer.decode(ids, skip_special_tokens=False)

  @contextlib.contextmanager
  def _expecting(self, accepted: str) -> Iterator[None]:
    """Names the file in errors of the library."""
    try:
      yield
    except Exception as error:  # The library raises bare Exception.
      self._fail(accepted, error)
    except BaseException as error:
      # Rust's panics are no Exception, and their class cannot be imported.
      if type(error).__name__ != "PanicException":
        raise
      self._fail(accepted, error)

  def _fail(self, accepted: str, error: object) -> NoReturn:
    reason = " ".join(str(error).split())
    config_lib.fail(
      "data.tokenizer_path",
      os.fspath(self._config.tokenizer_path),
      f"{accepted} ({reason})",
    )


class IdsTokenizer(Tokenizer):
  """The ids of a token file without a vocabulary, and hence without text.

  For training on published token shards without their tokenizer. The files at
  `config.data.path` declare the sizes.
  """

  name = "ids"

  def __init__(self, config: config_lib.DataConfig):
    if config.source != "tokens":
      config_lib.fail(
        "data.tokenizer",
        "ids",
        f"a tokenizer of text, with data.source={config.source!r}"
        " ('ids' reads data.source='tokens')",
      )
    self.vocab_size, separator_id = token_files.declared_vocabulary(config)
    # Without a separator nothing marks a document; any id can open a sample.
    self.separator_id = 0 if separator_id is None else separator_id
    self.has_separator = separator_id is not None

  def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    """Parses ids in decimal, as `decode` writes them."""
    return [self._parse(text.decode(errors="replace")) for text in texts]

  def _parse(self, text: str) -> np.ndarray:
    try:
      ids = [int(word) for word in text.split()]
    except ValueError:
      ids = [-1]
    if any(not 0 <= i < self.vocab_size for i in ids):
      raise config_lib.ConfigError(
        f"text {text!r}: with data.tokenizer='ids' only decimal ids"
        f" below {self.vocab_size} can be encoded"
      )
    return np.asarray(ids, np.int32)

  def decode(self, ids: Iterable[int]) -> str:
    return " ".join(str(int(i)) for i in ids)


TOKENIZERS = {
  "bytes": BytesTokenizer,
  "hf": HuggingFaceTokenizer,
  "ids": IdsTokenizer,
}


def make_tokenizer(config: config_lib.DataConfig) -> Tokenizer:
  """Builds the tokenizer that `config.tokenizer` names.

  Raises:
    ConfigError: no such name, or no such vocabulary file.
    ImportError: its library is not installed; says what to install.
  """
  cls = config_lib.choose("data.tokenizer", config.tokenizer, TOKENIZERS)
  for name in ("separator", "tokenizer_path"):
    if value := getattr(config, name):
      fields.check_acts(config, name, value)
  return cls(config)


def vocabulary_file(config: config_lib.DataConfig) -> tuple[str, str]:
  """The local name of the vocabulary file, and its SHA-256.

  Raises:
    ConfigError: there is no such file.
  """
  field = "data.tokenizer_path"
  path = files_lib.check_path(f"config.{field}", config.tokenizer_path)
  if path.is_dir():
    path = path / "tokenizer.json"
  if not files_lib.is_file(path):
    config_lib.fail(field, config.tokenizer_path, "an existing file")
  file = paths.File(field, path.name, path)
  local = file.local()
  with file.reading("a vocabulary"), open(local, "rb") as opened:
    return local, hashlib.file_digest(opened, "sha256").hexdigest()
