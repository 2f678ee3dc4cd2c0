# SPDX-License-Identifier: Apache-2.0
"""Prompts with their completions, of which only the completions are learnt.

Each line of a .jsonl file is an object with the texts `prompt` and
`completion`. An example is

  separator, prompt, completion, separator

and its loss counts the tokens of the completion and the separator that ends it.
Both texts are encoded separately, so that the tokens of a prompt are those that
it has when the network is asked. Rows hold whole examples, in the order of the
files, each a document of its own (`data.segment_ids`), and are padded.
"""

from collections.abc import Sequence
import hashlib
import json
import os
from typing import Any, NamedTuple

import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.data import documents
from attnres_jax.data import paths
from attnres_jax.data import tokenizer as tokenizer_lib

PROMPT, COMPLETION = "prompt", "completion"


class Example(NamedTuple):
  """One of them, encoded.

  Attributes:
    ids: with both separators.
    counted: how many of the last ids the loss counts.
  """

  ids: np.ndarray
  counted: int


class Examples:
  """The examples of a split; to the pipeline, what `tokens.Tokens` is.

  Attributes:
    vocab_size: every id is smaller.
    separator_id: the first and last id of each.
    description: describes and identifies the content; can be saved as JSON.
  """

  def __init__(
    self,
    examples: Sequence[Example],
    vocab_size: int,
    separator_id: int,
    description: dict[str, Any],
  ):
    self._examples = examples
    self.vocab_size = vocab_size
    self.separator_id: int | None = separator_id
    self.description = description

  def __len__(self) -> int:
    """The number of ids."""
    return sum(len(example.ids) for example in self._examples)

  def rows(self, sequence_length: int) -> "Rows":
    """Rows of T + 1 ids; see `Rows`."""
    return Rows(self._examples, sequence_length, self.separator_id)


class Rows:
  """Random access to padded rows of whole examples.

  A row has `tokens`, `segment_ids` (from 1; 0 for padding) and `counts` (1 for
  what the loss counts, as a target), each int32 [T+1].
  """

  def __init__(
    self, examples: Sequence[Example], sequence_length: int, separator_id: Any
  ):
    self._examples = examples
    self._size = sequence_length + 1
    self._separator_id = separator_id
    # The first example of each row, and the end.
    self._starts, room = [], 0
    for number, example in enumerate(examples):
      if len(example.ids) > room:
        self._starts.append(number)
        room = self._size
      room -= len(example.ids)
    self._starts.append(len(examples))

  def __len__(self) -> int:
    return len(self._starts) - 1

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    if not 0 <= index < len(self):
      raise IndexError(f"row {index} of {len(self)}")
    tokens = np.full(self._size, self._separator_id, np.int32)
    segment_ids, counts = np.zeros((2, self._size), np.int32)
    at = 0
    first, end = self._starts[index : index + 2]
    for number, example in enumerate(self._examples[first:end], 1):
      stop = at + len(example.ids)
      tokens[at:stop] = example.ids
      segment_ids[at:stop] = number
      counts[stop - example.counted : stop] = 1
      at = stop
    return dict(tokens=tokens, segment_ids=segment_ids, counts=counts)


def open_examples(
  config: config_lib.DataConfig,
  split: str,
  tokenizer: tokenizer_lib.Tokenizer,
) -> Examples:
  """Reads and encodes the examples of a split.

  Raises:
    ConfigError: a line cannot be used, or an example is longer than a row.
  """
  field, path, fraction = "data.path", config.path, config.validation_fraction
  if config.validation_path:
    fraction = None
    if split == documents.VALIDATION:
      field, path = "data.validation_path", config.validation_path
  digest = hashlib.sha256()
  examples: list[Example] = []
  separator = [tokenizer.separator_id]
  files = paths.list_files(field, path, (".jsonl",))
  for file in files:
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
      if not line.strip():
        continue
      where = f"{os.fspath(file)}:{number}"
      prompt, completion = _parse(field, where, line)
      key = documents.content_key(f"{prompt}\0{completion}".encode())
      if fraction is not None and documents.split_of(key, fraction) != split:
        continue
      digest.update(key.encode())
      before, after = map(tokenizer.encode, (prompt, completion))
      ids = np.concatenate([separator, before, after, separator])
      if len(ids) > config.sequence_length + 1:
        config_lib.fail(
          "data.sequence_length",
          config.sequence_length,
          f"at least {len(ids) - 1}, for the example at {where}",
        )
      examples.append(Example(ids.astype(np.int32), len(after) + 1))
  description = {
    "source": "instructions",
    "files": len(files),
    "split": split,
    "split_documents": len(examples),
    "split_sha256": digest.hexdigest(),
  }
  return Examples(
    examples, tokenizer.vocab_size, tokenizer.separator_id, description
  )


def _parse(field: str, where: str, line: bytes) -> tuple[str, str]:
  """The texts of a line."""
  try:
    record = json.loads(line)
  except (ValueError, RecursionError) as error:
    config_lib.fail(field, where, f"a line of JSON ({error})")
  names = ", ".join(record) if isinstance(record, dict) else "no object"
  texts = []
  for name in (PROMPT, COMPLETION):
    text = record.get(name) if isinstance(record, dict) else None
    if not isinstance(text, str):
      config_lib.fail(field, where, f"an object with text in {name!r}; {names}")
    # JSON can contain half a surrogate pair, which is not valid UTF-8.
    texts.append(text.encode(errors="replace").decode())
  if not texts[1]:
    config_lib.fail(field, where, f"a {COMPLETION!r} that is not empty")
  return texts[0], texts[1]
