# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a run of ours, as files that transformers reads.

With them, `tokenizer(text)` of transformers gives the ids of
`TextFormat.prompt(text)`: the separator, then the text.
"""

import json
import pathlib
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax.data import text_format as text_format_lib
from attnres_jax.data import tokenizer as tokenizer_lib

_NAME = "<|endoftext|>"


def of_run(
  config: config_lib.DataConfig, text_format: text_format_lib.TextFormat
) -> dict[str, bytes]:
  """Content by file name; empty for token ids, which have no text.

  Args:
    config: `data` of the run.
    text_format: of the run, not of an imported checkpoint.
  """
  if config.tokenizer == "ids":
    return {}
  separator = text_format.end_ids[0]
  content = b""
  if config.tokenizer != "bytes":
    path, _ = tokenizer_lib.vocabulary_file(config)
    content = pathlib.Path(path).read_bytes()
  made = json.loads(content) if content else _of_bytes()
  name = _open_texts(made, separator)
  described = dict(
    tokenizer_class="PreTrainedTokenizerFast",
    model_max_length=config.sequence_length,
    padding_side="left",
    clean_up_tokenization_spaces=False,
    bos_token=name,
    eos_token=name,
    pad_token=name,
    add_bos_token=True,
    # Special tokens written in a text are text.
    split_special_tokens=True,
    model_input_names=["input_ids", "attention_mask"],
  )
  return {
    "tokenizer.json": _json(made),
    "tokenizer_config.json": _json(described),
  }


def _open_texts(made: dict[str, Any], separator: int) -> str:
  """Lets a tokenizer.json open texts with the separator; returns its name."""
  vocabulary = made["model"]["vocab"]
  if isinstance(vocabulary, list):  # Unigram: pairs of token and score.
    vocabulary = {pair[0]: id for id, pair in enumerate(vocabulary)}
  names = {id: token for token, id in vocabulary.items()}
  added = {token["id"]: token for token in made.get("added_tokens") or []}
  usual = dict(
    id=separator, content=names.get(separator, _NAME), single_word=False,
    lstrip=False, rstrip=False, normalized=False,
  )  # fmt: skip
  added[separator] = added.get(separator, usual) | {"special": True}
  name = added[separator]["content"]
  token = {"SpecialToken": dict(id=name, type_id=0)}
  text = {"Sequence": dict(id="A", type_id=0)}
  made |= dict(
    truncation=None,
    padding=None,
    added_tokens=[added[id] for id in sorted(added)],
    post_processor=dict(
      type="TemplateProcessing",
      single=[token, text],
      pair=[token, text, token, {"Sequence": dict(id="B", type_id=0)}],
      special_tokens={name: dict(id=name, ids=[separator], tokens=[name])},
    ),
  )
  return name


def _of_bytes() -> dict[str, Any]:
  """A tokenizer.json whose ids are the bytes of a text."""
  # Bytes without a printable character have one above 255 (GPT-2).
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [b for b in range(256) if b not in printable]
  letters = {b: chr(b) for b in printable}
  letters |= {b: chr(256 + i) for i, b in enumerate(others)}
  level = dict(
    type="ByteLevel", add_prefix_space=False, trim_offsets=False,
    use_regex=False,
  )  # fmt: skip
  vocabulary = {letters[b]: b for b in range(256)}
  return dict(
    version="1.0",
    pre_tokenizer=level,
    decoder=level,
    model=dict(type="BPE", vocab=vocabulary, merges=[]),
  )


def _json(values: dict[str, Any]) -> bytes:
  return (json.dumps(values, indent=2) + "\n").encode()
