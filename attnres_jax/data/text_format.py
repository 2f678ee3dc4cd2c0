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
  beside it: tokenizer.json says what opens a text. What ends it is the
  `eos_token_id` of generation_config.json, or else of config.json (which
  interop.json repeats), or else the `eos_token` of tokenizer_config.json or
  special_tokens_map.json. Decoding skips special tokens. All of this is what
  transformers does.
"""

from collections.abc import Iterable, Sequence
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
_IMPORTED = "interop.json"
_NAMES = (
  "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
  "mask_token",
)  # fmt: skip


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

  def decode(self, ids: Sequence[int]) -> str:
    """The text of ids, without special tokens."""
    return self.tokenizer.decode(ids)

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
  that begins in the ids before belongs to the first piece.
  """

  def __init__(
    self, tokenizer: tokenizer_lib.Tokenizer, before: Sequence[int] = ()
  ):
    """Decodes what follows the ids `before`."""
    self._tokenizer = tokenizer
    # Decoding may depend on earlier tokens: the window begins with one that
    # is text by itself. Of the window's text, `_shown` characters are released.
    start = len(before)
    while start and not self._is_anchor(before[start - 1]):
      start -= 1
    window = before[max(start - 1, 0) :]
    self._ids = [id for id in window if not tokenizer.skips(id)]
    self._shown = 0
    # Until something is released: what is in common depends on what follows.
    self._before: str | None = tokenizer.decode(self._ids)

  def add(self, id: int) -> str:
    """What another id makes certain; may be empty."""
    if self._tokenizer.skips(id):
      return ""
    self._ids.append(id)
    if id in self._tokenizer.run_ids:
      return ""
    now = certain = self._tokenizer.decode(self._ids)
    if not self._tokenizer.run_ids:
      for _ in range(_MAX_UNKNOWN):
        certain = certain.removesuffix(_UNKNOWN)
    more = self._released(certain)
    if certain == now and self._is_anchor(id):
      self._ids, self._before = [id], None
      certain = self._tokenizer.decode(self._ids)
      self._shown = 0
    self._shown = max(self._shown, len(certain))
    return more

  def end(self) -> str:
    """The rest of the text, once there are no more ids."""
    now = self._tokenizer.decode(self._ids)
    more, self._shown = self._released(now), len(now)
    return more

  def _released(self, text: str) -> str:
    """The part of the window's text that is not yet released."""
    if self._before is not None:
      self._shown = len(os.path.commonprefix([self._before, text]))
    more = text[self._shown :]
    if more:
      self._before = None
    return more

  def _is_anchor(self, id: int) -> bool:
    """Whether a token is text by itself, whatever stands before it."""
    if self._tokenizer.skips(id) or id in self._tokenizer.run_ids:
      return False
    text = self._tokenizer.decode([id])
    return bool(text) and _UNKNOWN not in text


def of_tokenizer(tokenizer: tokenizer_lib.Tokenizer) -> TextFormat:
  """The format of a run of ours: the separator opens and ends documents."""
  separator = tokenizer.separator_id
  ends = (separator,) if tokenizer.has_separator else ()
  return TextFormat(tokenizer, (separator,), ends, separator, separator)


def of_data(
  config: config_lib.DataConfig, workdir: str | os.PathLike | None = None
) -> TextFormat:
  """The format of the texts that a run was trained on.

  Args:
    config: `data` of the run's configuration.
    workdir: of the run, whose files tell what ends a text if the tokenizer has
      no vocabulary file.

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

  Args:
    config: names the tokenizer and its vocabulary file.
    folder: with tokenizer_config.json, special_tokens_map.json,
      generation_config.json, and config.json or interop.json; any may be
      absent.

  Raises:
    ConfigError: a file cannot be read, or a value cannot be used.
    ImportError: the tokenizer's library is not installed.
  """
  described = _Described(epath.Path(folder))
  opening: tuple[int, ...] = ()
  named: dict[str, int | None] = {}
  if config.tokenizer == "hf":
    tokenizer = _Imported(config, described)
    opening = tokenizer.opening
    for role, text in described.names().items():
      named[role] = tokenizer.id_of(text)
  else:
    tokenizer = tokenizer_lib.make_tokenizer(config)
  ends, begins = (
    described.ids(key) for key in ("eos_token_id", "bos_token_id")
  )
  if not ends and named.get("eos_token") is not None:
    ends = (named["eos_token"],)
  bos_id = named.get("bos_token")
  if bos_id is None and begins:
    bos_id = begins[0]
  pads = described.ids("pad_token_id")
  return TextFormat(
    tokenizer,
    opening,
    ends,
    bos_id,
    named.get("pad_token", pads[0] if pads else None),
    imported=True,
  )


class _Described:
  """What the files of a checkpoint say beside its vocabulary."""

  def __init__(self, folder: epath.Path):
    self._folder = folder
    imported = self._read(_IMPORTED).get("config", {})
    # Of a run of ours, config.json is the run's own configuration.
    config = "config.json"
    self._configs = {
      "generation_config.json": self._read("generation_config.json"),
      **({_IMPORTED: imported} if imported else {config: self._read(config)}),
    }
    newer = self._read("tokenizer_config.json").items()
    self.tokenizer = self._read("special_tokens_map.json") | {
      key: value for key, value in newer if value is not None
    }

  def ids(self, key: str) -> tuple[int, ...]:
    """The ids of the first file that has the key: a number or a list."""
    for file, values in self._configs.items():
      value = values.get(key)
      if value is None:
        continue
      value = value if isinstance(value, list) else [value]
      # transformers writes -1 for none.
      value = [id for id in value if id != -1]
      for id in value:
        fields.accept(f"{self._folder / file}: {key}", id, fields.Count)
      # A network may have more tokens than its vocabulary file.
      return tuple(dict.fromkeys(value))
    return ()

  def names(self) -> dict[str, str]:
    """Text of special tokens by their role."""
    texts = {
      role: _content(value)
      for role in _NAMES
      if (value := self.tokenizer.get(role)) is not None
    }
    for role, text in texts.items():
      if not isinstance(text, str):
        where = self._folder / "tokenizer_config.json"
        config_lib.fail_argument(
          f"{where}: {role}", text, "the text of a token"
        )
    return texts

  def special(self) -> set[str]:
    """Texts of tokens that these files call special, whatever their role."""
    named, added = (
      value if isinstance(value := self.tokenizer.get(key), dict) else {}
      for key in ("extra_special_tokens", "added_tokens_decoder")
    )
    special = [
      token
      for token in added.values()
      if isinstance(token, dict) and token.get("special")
    ]
    texts = map(_content, [*named.values(), *special])
    return {*self.names().values(), *(t for t in texts if isinstance(t, str))}

  def _read(self, name: str) -> dict[str, Any]:
    path = self._folder / name
    return records.read_object(path) if path.exists() else {}


def _content(token: Any) -> Any:
  """The text of a token, which may be an object with a `content`."""
  return token.get("content") if isinstance(token, dict) else token


class _Imported(tokenizer_lib.HuggingFaceTokenizer):
  """The tokenizer.json of a checkpoint; decoding skips special tokens.

  Attributes:
    opening: ids before every text.
  """

  def __init__(self, config: config_lib.DataConfig, described: _Described):
    super().__init__(config)
    tokenizer = self._tokenizer
    # Other files make tokens special even if tokenizer.json does not.
    added = tokenizer.get_added_tokens_decoder().values()
    special_texts = {token.content for token in added if token.special}
    tokenizer.add_special_tokens(
      [
        text
        for text in sorted(described.special())
        if text not in special_texts and tokenizer.token_to_id(text) is not None
      ]
    )
    special = tokenizer.get_added_tokens_decoder().items()
    self._text_ids = {*tokenizer.get_vocab(with_added_tokens=True).values()} - {
      id for id, token in special if token.special
    }
    encoded = tokenizer.encode("a")
    mask = encoded.special_tokens_mask
    self.opening = tuple(encoded.ids[: mask.index(0) if 0 in mask else 0])

  def decode(self, ids: Iterable[int]) -> str:
    # Larger numbers overflow inside the library.
    shown_ids = [id for id in ids if not self.skips(id)]
    return self._tokenizer.decode(shown_ids, skip_special_tokens=True)

  def skips(self, id: int) -> bool:
    return id not in self._text_ids

  def id_of(self, text: str) -> int | None:
    """The id of a token, if the vocabulary has it."""
    return self._tokenizer.token_to_id(text)

  def name_of(self, id: int) -> str | None:
    """The token of an id, if the vocabulary has it."""
    return self._tokenizer.id_to_token(id)
