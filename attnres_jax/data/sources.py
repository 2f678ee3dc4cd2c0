# SPDX-License-Identifier: Apache-2.0
"""The registry of data sources.

`tokens` reads files of ids at any position, and `instructions` prompts with
completions; every other source is text,
tokenised in memory when it is opened. That takes well under a second for the
embedded corpus but minutes for gigabytes, in every process: prepare large
sources with `python -m attnres_jax.data.prepare`, and read the token files.
"""

from collections.abc import Callable, Iterator
import hashlib
from typing import Any, NamedTuple

import numpy as np
import tqdm

from attnres_jax import config as config_lib
from attnres_jax.data import documents
from attnres_jax.data import instructions
from attnres_jax.data import stdlib
from attnres_jax.data import text as text_lib
from attnres_jax.data import token_files
from attnres_jax.data import tokenizer as tokenizer_lib
from attnres_jax.data import tokens as tokens_lib

# Text is encoded in pieces of this size, so that a library can use threads.
_ENCODE_BYTES = 1 << 20


def _open_stdlib(
  config: config_lib.DataConfig, field: str, path: str
) -> documents.Documents:
  del field, path
  for name in ("path", "validation_path"):
    value = getattr(config, name)
    if value:
      config_lib.fail(
        f"data.{name}", value, "nothing, with data.source='stdlib'"
      )
  return stdlib.StdlibDocuments()


TEXT_SOURCES: dict[str, Callable[..., documents.Documents]] = {
  "arrayrecord": text_lib.ArrayRecordDocuments,
  "jsonl": text_lib.JsonlDocuments,
  "parquet": text_lib.ParquetDocuments,
  "stdlib": _open_stdlib,
  "text": text_lib.FolderDocuments,
}
"""Name to opener (config, field, path), for sources that `prepare` can read."""


def open_documents(
  config: config_lib.DataConfig, split: str
) -> tuple[documents.Documents, float | None]:
  """Opens the text that contains a split.

  Returns:
    The documents, and the fraction of them held out by hash; None if the
    validation split has its own path, so that each path is one whole split.
  """
  opener = config_lib.choose("data.source", config.source, TEXT_SOURCES)
  if not config.validation_path or config.source == "stdlib":
    opened = opener(config, "data.path", config.path)
    return opened, config.validation_fraction
  if split == documents.TRAIN:
    return opener(config, "data.path", config.path), None
  return opener(config, "data.validation_path", config.validation_path), None


def in_split(
  document: documents.Document, split: str, fraction: float | None
) -> bool:
  """Whether a document of `open_documents` belongs to the split."""
  return fraction is None or documents.split_of(document.key, fraction) == split


def open_text(
  config: config_lib.DataConfig,
  split: str,
  tokenizer: tokenizer_lib.Tokenizer,
) -> tokens_lib.Tokens:
  """Tokenises the documents of a split in memory, including separators."""
  source, fraction = open_documents(config, split)
  digest = hashlib.sha256()
  arrays, num_bytes = [], 0
  # A progress bar that appears only if this takes a while.
  with tqdm.tqdm(
    total=len(source),
    desc=f"tokenising {config.source} ({split})",
    unit="doc",
    delay=3.0,
  ) as bar:
    for encoded in encode_split(source, split, fraction, tokenizer, bar=bar):
      arrays.append(encoded.ids)
      digest.update(encoded.text)
      num_bytes += len(encoded.text)
  return tokens_lib.Tokens(
    [np.concatenate(arrays)] if arrays else [],
    vocab_size=tokenizer.vocab_size,
    separator_id=tokenizer.separator_id,
    description=source.describe()
    | {
      "split": split,
      "split_rule": describe_split(fraction),
      "split_documents": len(arrays),
      "split_bytes": num_bytes,
      "split_sha256": digest.hexdigest(),
    },
  )


class EncodedDocument(NamedTuple):
  """A document of a split as it is stored.

  Attributes:
    number: its position in the source.
    text: UTF-8 bytes.
    ids: the separator, then the document, in the smallest dtype.
  """

  number: int
  text: bytes
  ids: np.ndarray


def encode_split(
  source: documents.Documents,
  split: str,
  fraction: float | None,
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  start: int = 0,
  bar: tqdm.tqdm,
) -> Iterator[EncodedDocument]:
  """Yields the documents of a split from number `start` on, without empty ones.

  Advances `bar` by every document, in the split or not.
  """
  dtype = token_dtype(tokenizer.vocab_size)
  separator = np.asarray([tokenizer.separator_id], dtype)
  for batch in _batches(source, start):
    chosen = [
      (number, document.text)
      for number, document in batch
      if document.text and in_split(document, split, fraction)
    ]
    encoded = tokenizer.encode_batch([text for _, text in chosen])
    for (number, text), ids in zip(chosen, encoded):
      ids = np.concatenate([separator, ids.astype(dtype)])
      yield EncodedDocument(number, text, ids)
    bar.update(len(batch))


def token_dtype(vocab_size: int) -> np.dtype:
  """The smallest dtype of token files that holds these ids."""
  return token_files.DTYPES["uint16" if vocab_size <= 1 << 16 else "uint32"]


def describe_split(fraction: float | None) -> str:
  if fraction is None:
    return "each split has a path of its own"
  return (
    "a document is validation if the first 8 bytes of the SHA-256 of its key"
    f" (relative path, or SHA-256 of its text) are below {fraction:g} of"
    " their range"
  )


SOURCES: dict[str, Callable[..., Any]] = {
  "instructions": instructions.open_examples,
  "tokens": token_files.open_tokens,
} | dict.fromkeys(TEXT_SOURCES, open_text)
"""Name to opener (config, split, tokenizer) of `tokens.Tokens` or
`instructions.Examples`, for `open_dataset`."""


def _batches(
  source: documents.Documents, start: int
) -> Iterator[list[tuple[int, documents.Document]]]:
  batch, size = [], 0
  for number, document in enumerate(source.iterate(start), start):
    batch.append((number, document))
    size += len(document.text)
    if size >= _ENCODE_BYTES:
      yield batch
      batch, size = [], 0
  yield batch
