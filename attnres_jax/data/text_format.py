# SPDX-License-Identifier: Apache-2.0
"""How texts of a network open, end, and become text again.

  text_format = text_format_lib.of_data(config.data)
  prompt = [*text_format.open_ids, *text_format.encode("Once")]
  decoder = text_format.decoder(prompt)
  for id in drawn:
    if id in text_format.end_ids:
      break
    print(decoder.add(id), end="")
  print(decoder.end())

`sample` and exports turn text into tokens and back with this object. It has two
origins:

- A run of ours: the tokenizer's separator opens and ends every document.
- An imported checkpoint, which is a vocabulary file with an `interop.json`
  beside it: tokenizer.json says what opens a text and which tokens are special.
  What ends it is the `eos_token_id` of generation_config.json, or else of
  config.json (which interop.json repeats). Decoding skips special tokens. So
  does transformers.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import os
from typing import Any

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax.common import records
from attnres_jax.config import fields
from attnres_jax.data import tokenizer as tokenizer_lib

# How decoders show bytes that are not, or not yet, a character.
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# A character that is not complete has at most three bytes, and a decoder shows
# at most one of these for each.
_MAX_UNKNOWN = 3
# How many earlier ids a decoder looks at: the text of a token may depend on
# them, and bytes of one character on each other.
_CONTEXT = 512
_IMPORTED = "interop.json"
# In order of preference. Of a run of ours, config.json has none of the keys.
_CONFIGS = "generation_config.json", _IMPORTED, "config.json"


@dataclasses.dataclass(frozen=True)
class TextFormat:
  """How texts of one network open, end, and become text again.

  Attributes:
    tokenizer: ids of text and text of ids.
    open_ids: ids before every text; may be empty.
    end_ids: ids that end a text; empty if nothing is known to end one.
    bos_id: id of the begin-of-sequence token, or None. Where something has to
      stand before the first token of a text, it is `prefix_id`.
    pad_id: id of the padding token, or None.
    imported: whether an imported checkpoint sets these conventions.
  """

  tokenizer: tokenizer_lib.Tokenizer
  open_ids: tuple[int, ...]
  end_ids: tuple[int, ...]
  bos_id: int | None = None
  pad_id: int | None = None
  imported: bool = False

  @property
  def prefix_id(self) -> int:
    """What stands before a text whose first token is scored, too."""
    candidates = (*self.open_ids, self.bos_id, *self.end_ids)
    return next((id for id in candidates if id is not None), 0)

  def encode(self, text: str) -> list[int]:
    """Ids of a text without its opening."""
    return self.tokenizer.encode(text).tolist()

  def prompt(self, text: str) -> list[int]:
    """Ids of a text to continue: the opening, then the text.

    At least one id, so that there is something to continue.
    """
    ids = [*self.open_ids, *self.encode(text)]
    return ids or [self.prefix_id]

  def decoder(self, before: Sequence[int] = ()) -> "Decoder":
    """Decodes what follows the ids `before`, token by token."""
    return Decoder(self.tokenizer, before)

  def describe(self) -> dict[str, Any]:
    """Keys of config.json and generation_config.json for an export."""
    ends = list(self.end_ids)
    bos = self.open_ids[0] if self.open_ids else self.bos_id
    return dict(
      bos_token_id=bos,
      eos_token_id=ends[0] if len(ends) == 1 else ends or None,
      pad_token_id=self.pad_id,
    )


class Decoder:
  """Releases text of the ids that follow others once it is certain.

  All released pieces together are the text of all ids minus what the text of
  those before has in common with it. So a first piece keeps the space that its
  token begins with, bytes of a character wait for each other, and a character
  that begins in the ids before belongs to the first piece. Each call decodes
  the last ids again.
  """

  def __init__(
    self, tokenizer: tokenizer_lib.Tokenizer, before: Sequence[int] = ()
  ):
    """Decodes what follows the ids `before`."""
    self._tokenizer = tokenizer
    self._ids = list(before[-_CONTEXT:])
    self._before = tokenizer.decode(self._ids)
    # Characters of the text of these ids; None until some are released.
    self._shown: int | None = None

  def add(self, id: int) -> str:
    """What another id makes certain; may be empty."""
    self._ids.append(id)
    if id in self._tokenizer.run_ids or self._tokenizer.skips(id):
      return ""
    return self._release(_MAX_UNKNOWN)

  def end(self) -> str:
    """The rest of the text, once there are no more ids."""
    return self._release(0)

  def _release(self, most_unknown: int) -> str:
    decoded = text = self._tokenizer.decode(self._ids)
    shown = self._shown
    if shown is None:  # What is in common depends on what follows.
      shown = len(os.path.commonprefix([self._before, text]))
    for _ in range(most_unknown):
      text = text.removesuffix(_UNKNOWN)
    more = text[shown:]
    if more:
      self._shown = len(text)
    if more and text == decoded and len(self._ids) > 2 * _CONTEXT:
      self._ids = self._ids[-_CONTEXT:]
      self._shown = len(self._tokenizer.decode(self._ids))
    return more


def of_tokenizer(tokenizer: tokenizer_lib.Tokenizer) -> TextFormat:
  """The format of a run of ours: the separator opens and ends documents."""
  separator = tokenizer.separator_id
  ends = (separator,) if tokenizer.has_separator else ()
  return TextFormat(tokenizer, (separator,), ends, separator, separator)


def of_data(
  config: config_lib.DataConfig, workdir: str | os.PathLike | None = None
) -> TextFormat:
  """The format of the texts that a run was trained on.

  Files of its folder tell what ends a text if the tokenizer has no vocabulary.

  Raises:
    ConfigError: a file cannot be read, or a value cannot be used; names the
      file, the key and the value.
    ImportError: the tokenizer's library is not installed.
  """
  folder = workdir
  if config.tokenizer_path:
    path = epath.Path(config.tokenizer_path).expanduser()
    folder = path if path.is_dir() else path.parent
  if folder is None or not (epath.Path(folder) / _IMPORTED).exists():
    return of_tokenizer(tokenizer_lib.make_tokenizer(config))
  return of_checkpoint(config, folder)


def of_checkpoint(
  config: config_lib.DataConfig, folder: str | os.PathLike
) -> TextFormat:
  """The format of a checkpoint of Hugging Face, from the files of its folder.

  Raises:
    ConfigError: a file cannot be read, or a value cannot be used.
    ImportError: the tokenizer's library is not installed.
  """
  opening: tuple[int, ...] = ()
  if config.tokenizer == "hf":
    tokenizer = _Imported(config)
    opening = tokenizer.opening
  else:
    tokenizer = tokenizer_lib.make_tokenizer(config)
  files = {}
  for name in _CONFIGS:
    path = epath.Path(folder) / name
    if path.exists():
      values = records.read_object(path)
      files[path] = values.get("config", {}) if name == _IMPORTED else values
  ends, begins, pads = (
    _ids(files, f"{role}_token_id") for role in ("eos", "bos", "pad")
  )
  return TextFormat(
    tokenizer, opening, ends, next(iter(begins), None), next(iter(pads), None),
    imported=True,
  )  # fmt: skip


def _ids(
  files: Mapping[epath.Path, Mapping[str, Any]], key: str
) -> tuple[int, ...]:
  """The ids of the first file that has the key: a number or a list."""
  for path, values in files.items():
    value = values.get(key)
    if value is None:
      continue
    value = value if isinstance(value, list) else [value]
    # transformers writes -1 for none.
    value = [id for id in value if id != -1]
    for id in value:
      fields.accept(f"{path}: {key}", id, fields.Count)
    # A network may have more tokens than its vocabulary file.
    return tuple(dict.fromkeys(value))
  return ()


class _Imported(tokenizer_lib.HuggingFaceTokenizer):
  """The tokenizer.json of a checkpoint; decoding skips special tokens.

  Attributes:
    opening: ids before every text.
  """

  def __init__(self, config: config_lib.DataConfig):
    super().__init__(config)
    special = self._tokenizer.get_added_tokens_decoder().items()
    ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
    self._text_ids = {*ids} - {id for id, token in special if token.special}
    encoded = self._tokenizer.encode("a")
    mask = encoded.special_tokens_mask
    self.opening = tuple(encoded.ids[: mask.index(0) if 0 in mask else 0])

  def decode(self, ids: Iterable[int]) -> str:
    # Larger numbers overflow inside the library.
    shown_ids = [id for id in ids if not self.skips(id)]
    return self._tokenizer.decode(shown_ids, skip_special_tokens=True)

  def skips(self, id: int) -> bool:
    return id not in self._text_ids

  def name_of(self, id: int) -> str | None:
    """The token of an id, if the vocabulary has it."""
    return self._tokenizer.id_to_token(id)
