# SPDX-License-Identifier: Apache-2.0
"""The registry of data sources.

`tokens` reads files of ids at any position; every other source is text,
tokenised in memory when it is opened.
That takes well under a second for the embedded corpus but minutes for
gigabytes, in every process: prepare large sources with
`python -m attnres_jax.data.prepare`, and read the token files.
"""

from collections.abc import Callable, Iterator, Sequence
import hashlib
from typing import Any, NamedTuple

import numpy as np
import tqdm

from attnres_jax import config as config_lib
from attnres_jax.data import documents
from attnres_jax.data import packing
from attnres_jax.data import paths
from attnres_jax.data import stdlib
from attnres_jax.data import text as text_lib
from attnres_jax.data import token_files
from attnres_jax.data import tokenizer as tokenizer_lib

TEXT_SOURCES = ("jsonl", "parquet", "stdlib", "text")
"""The sources that `prepare` can read."""

# Documents are encoded in batches of this size, because libraries take 100
# times the memory. A longer document is not cut: its ids would be others, since
# tokenizers look at what is before a word.
_ENCODE_BYTES = 1 << 20


class Opened(NamedTuple):
  """Text of one split or of both.

  Attributes:
    documents: in a fixed order; a description of them identifies them.
    fraction: of the documents that a hash holds out; None if all of them belong
      to one split.
    rule: says in words which documents belong to a split.
  """

  documents: text_lib.FileDocuments | stdlib.StdlibDocuments
  fraction: float | None
  rule: str


def open_splits(config: config_lib.DataConfig) -> dict[str, Opened]:
  """The text of each split: one object for both if a hash divides it."""
  config_lib.choose("data.source", config.source, dict.fromkeys(TEXT_SOURCES))
  if config.source == "stdlib":
    for name in ("path", "validation_path"):
      value = getattr(config, name)
      if value:
        others = ", ".join(name for name in SOURCES if name != "stdlib")
        accepted = (
          "nothing, with data.source='stdlib', or a source that reads it:"
          f" {others}"
        )
        config_lib.fail(f"data.{name}", value, accepted)
    return _by_hash(config, stdlib.StdlibDocuments())
  is_text = config.source == "text"
  files, shared = paths.splits(
    config, text_lib.FORMATS[config.source].suffixes, all_named=is_text
  )
  if not shared:
    rule = "the names of the files, or a path of its own"
    return {
      split: Opened(text_lib.FileDocuments(config, files[split]), None, rule)
      for split in documents.SPLITS
    }
  both = files[documents.TRAIN]
  if is_text and len(both) == 1:
    rule = f"the last {config.validation_fraction:g} of the text is validation"
    return {
      split: Opened(text_lib.FileDocuments(config, both, split), None, rule)
      for split in documents.SPLITS
    }
  return _by_hash(config, text_lib.FileDocuments(config, both))


def open_text(
  config: config_lib.DataConfig,
  split: str,
  tokenizer: tokenizer_lib.Tokenizer,
) -> packing.Tokens:
  """Tokenises the documents of a split in memory, including separators."""
  opened = open_splits(config)[split]
  digest = hashlib.sha256()
  arrays, num_bytes = [], 0
  # A progress bar that appears only if this takes a while.
  with tqdm.tqdm(
    desc=f"tokenising {config.source} ({split})", unit=" doc", delay=3.0
  ) as bar:
    for encoded in encode(opened, (split,), tokenizer, bar=bar):
      arrays.append(encoded.ids)
      digest.update(encoded.text)
      num_bytes += len(encoded.text)
  return packing.Tokens(
    [np.concatenate(arrays)] if arrays else [],
    vocab_size=tokenizer.vocab_size,
    separator_id=tokenizer.separator_id,
    description=opened.documents.describe()
    | {
      "split": split,
      "split_rule": opened.rule,
      "split_documents": len(arrays),
      "split_bytes": num_bytes,
      "split_sha256": digest.hexdigest(),
    },
  )


class EncodedDocument(NamedTuple):
  """A document of a split in the form that token files have.

  The number is its position in the source. Ids are the separator, then the
  document, in the smallest dtype.
  """

  number: int
  split: str
  text: bytes
  ids: np.ndarray


def encode(
  opened: Opened,
  splits: Sequence[str],
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  start: int = 0,
  bar: tqdm.tqdm,
) -> Iterator[EncodedDocument]:
  """Yields the documents of splits from number `start` on, without empty ones.

  There is one split unless a hash divides the documents. Every document
  advances the bar, whatever its split.
  """
  is_small = tokenizer.vocab_size <= 1 << 16
  dtype = token_files.DTYPES["uint16" if is_small else "uint32"]
  separator = np.asarray([tokenizer.separator_id], dtype)
  for batch in _batches(opened, splits, start, bar):
    encoded = tokenizer.encode_batch([text for *_, text in batch])
    for document, ids in zip(batch, encoded, strict=True):
      with_separator = np.concatenate([separator, ids.astype(dtype)])
      yield EncodedDocument(*document, with_separator)


SOURCES: dict[str, Callable[..., Any]] = {
  "tokens": token_files.open_tokens,
} | dict.fromkeys(TEXT_SOURCES, open_text)
"""Name to opener (config, split, tokenizer) of `packing.Tokens`, for
`open_dataset`."""


def _by_hash(config: config_lib.DataConfig, source: Any) -> dict[str, Opened]:
  fraction = config.validation_fraction
  rule = (
    "a document is validation if the first 8 bytes of the SHA-256 of its key"
    f" (relative path, or SHA-256 of its text) are below {fraction:g} of"
    " their range"
  )
  return dict.fromkeys(documents.SPLITS, Opened(source, fraction, rule))


def _batches(
  opened: Opened, splits: Sequence[str], start: int, bar: tqdm.tqdm
) -> Iterator[list[tuple[int, str, bytes]]]:
  """Number, split and text of the documents of splits that have a text."""
  batch, size = [], 0
  for number, document in enumerate(opened.documents.iterate(start), start):
    bar.update()
    split = splits[0]
    if opened.fraction is not None:
      split = documents.split_of(document.key, opened.fraction)
    if document.text and split in splits:
      batch.append((number, split, document.text))
      size += len(document.text)
    if size >= _ENCODE_BYTES:
      yield batch
      batch, size = [], 0
  if batch:
    yield batch
