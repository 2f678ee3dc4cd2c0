# SPDX-License-Identifier: Apache-2.0
r"""Tokenises a text source once into token files, which runs read.

  python -m attnres_jax.data.prepare --source=jsonl --path='corpus/*.jsonl' \
      --tokenizer=hf --tokenizer_path=tokenizer.json --output=DIR

Then train with data.source=tokens, data.path=DIR and the same tokenizer. DIR
(local, gs:// or s3://) holds `train-00000.bin`, ... and
`validation-00000.bin`, ... with a sidecar each (see `token_files`), and
`dataset.json`, which describes the data and says whether it is complete.

Every file gets its name only when it is complete: ids first, then the sidecar,
`dataset.json` last. A shard ends with a document, and its sidecar says which
document comes next. If the command is interrupted, rerun it to resume after the
last complete shard; the result is the same bytes. If the source (by names and
sizes), tokenizer or an option has changed, the command refuses.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
import os
import sys
from typing import Any

from etils import epath
import numpy as np
import tqdm

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import files as files_lib
from attnres_jax.common import records
from attnres_jax.config import fields
from attnres_jax.data import documents
from attnres_jax.data import paths
from attnres_jax.data import sources
from attnres_jax.data import token_files
from attnres_jax.data import tokenizer as tokenizer_lib

SHARD_TOKENS = 1 << 26


def prepare(
  config: config_lib.DataConfig,
  output: str,
  *,
  shard_tokens: int = SHARD_TOKENS,
  progress: bool = True,
) -> token_files.Dataset:
  """Writes the token files of both splits, or resumes writing them.

  A shard ends with the document that reaches `shard_tokens`. Returns what
  `dataset.json` in the folder `output`, local or in a store, says.

  Raises:
    ConfigError: a bad source or tokenizer, or an output folder in use.
  """
  fields.accept("--shard_tokens", shard_tokens, fields.Size)
  tokenizer = tokenizer_lib.make_tokenizer(config)
  settings = _settings(config, tokenizer, shard_tokens)
  folder = files_lib.check_folder("--output", output)
  dataset = _begin(folder, settings)
  if dataset.complete:
    return dataset
  splits = _write_splits(config, tokenizer, folder, shard_tokens, progress)
  if not splits[documents.TRAIN].tokens:
    config_lib.fail("data.path", config.path, "text to train on")
  dataset = token_files.Dataset(True, settings, splits)
  records.write(folder / token_files.DATASET_FILE, dataset)
  return dataset


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  return command_line.run(_prepare, vars(_parser().parse_args(argv)))


def _prepare(args: dict[str, Any]) -> None:
  output, shard_tokens = args.pop("output"), args.pop("shard_tokens")
  config = config_lib.DataConfig(**args)
  dataset = prepare(config, output, shard_tokens=shard_tokens)
  for split, written in dataset.splits.items():
    print(
      f"{split}: {written.documents:,} documents, {written.bytes:,} bytes,"
      f" {written.tokens:,} tokens in {len(written.files)} files"
    )
  print(f"wrote {output}: train with data.source=tokens data.path={output}")


def _parser() -> command_line.Parser:
  parser = command_line.Parser("python -m attnres_jax.data.prepare", __doc__)
  add, defaults = parser.add_argument, config_lib.DataConfig()
  kinds = fields.kinds(config_lib.DataConfig)
  for name, words in {
    "source": ", ".join(sources.TEXT_SOURCES),
    "path": "file, folder, glob, or several with commas between",
    "validation_path": "same for validation; if empty, --path is split",
    "validation_fraction": "fraction held out, if --path is split",
    "text_field": "field or column of jsonl and parquet",
    "tokenizer": "bytes or hf",
    "tokenizer_path": "vocabulary file",
    "separator": "special token between documents; if empty, the usual one",
  }.items():
    default = getattr(defaults, name)
    add(f"--{name}", type=kinds[name], default=default, help=words)
  add("--output", required=True, help="folder to write to")
  add(
    "--shard_tokens", type=fields.Size, default=SHARD_TOKENS,
    help="tokens per file, rounded up to a document",
  )  # fmt: skip
  return parser


def _settings(
  config: config_lib.DataConfig,
  tokenizer: tokenizer_lib.Tokenizer,
  shard_tokens: int,
) -> dict[str, Any]:
  """Everything that determines the bytes that are written."""
  opened = sources.open_splits(config)
  train, held_out = (opened[split] for split in documents.SPLITS)
  described = {"source": train.documents.describe()}
  if held_out is not train:
    described["validation_source"] = held_out.documents.describe()
  return described | {
    "split_rule": train.rule,
    "tokenizer": tokenizer.describe(),
    "shard_tokens": shard_tokens,
  }


def _begin(folder: epath.Path, settings: dict[str, Any]) -> token_files.Dataset:
  """Reads `dataset.json` if its settings match, else starts a new one."""
  path = folder / token_files.DATASET_FILE
  entries = list(folder.iterdir()) if folder.is_dir() else []
  if not entries:
    dataset = token_files.Dataset(False, settings, {})
    folder.mkdir(parents=True, exist_ok=True)
    records.write(path, dataset)
    return dataset
  if not path.is_file():
    accepted = f"an empty folder (this one has {len(entries)} files)"
    config_lib.fail_argument("--output", os.fspath(folder), accepted)
  dataset = token_files.read_dataset("--output", folder)
  differing = config_lib.differences(dataset.settings, settings)
  if differing:
    accepted = (
      "a folder written with the same options, or a new one (other:"
      f" {', '.join(differing)})"
    )
    config_lib.fail_argument("--output", os.fspath(folder), accepted)
  for split in documents.SPLITS:
    for leftover in files_lib.glob(folder, f"{split}-*.tmp"):
      (folder / leftover).unlink()
  return dataset


def _write_splits(
  config: config_lib.DataConfig,
  tokenizer: tokenizer_lib.Tokenizer,
  folder: epath.Path,
  shard_tokens: int,
  progress: bool,
) -> dict[str, token_files.Split]:
  """Writes what is missing, and reads text that both splits share once."""
  opened = sources.open_splits(config)
  writers = {
    split: _ShardWriter(folder, split, tokenizer.describe(), shard_tokens)
    for split in documents.SPLITS
  }
  # Each text with the splits that come from it.
  for text in {id(source): source for source in opened.values()}.values():
    splits = [split for split in documents.SPLITS if opened[split] is text]
    start = min(writers[split].next_document for split in splits)
    with tqdm.tqdm(
      initial=start,
      desc=f"{config.source} -> {' and '.join(splits)}",
      unit=" doc",
      disable=not progress,
    ) as bar:
      for encoded in sources.encode(
        text, splits, tokenizer, start=start, bar=bar
      ):
        if encoded.number >= writers[encoded.split].next_document:
          if writers[encoded.split].add(encoded):
            written = sum(w.written().tokens for w in writers.values())
            bar.set_postfix_str(f"{written:,} tokens written")
    for split in splits:
      writers[split].flush()
  return {split: writer.written() for split, writer in writers.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard(token_files.Sidecar):
  """The sidecar of a file of `prepare`."""

  count: records.Bytes  # pyrefly: ignore[bad-override]
  documents: records.Bytes
  bytes: records.Bytes
  next_document: records.Bytes


class _ShardWriter:
  """Collects documents and writes them as the next shard of a split.

  Attributes:
    shards: sidecars of the complete shards, from an earlier call too.
  """

  def __init__(
    self,
    folder: epath.Path,
    split: str,
    tokenizer: dict[str, Any],
    shard_tokens: int,
  ):
    self._folder, self._split = folder, split
    self._tokenizer, self._shard_tokens = tokenizer, shard_tokens
    self.shards: list[Any] = []
    while self._path("json").is_file():
      name = self._path("bin").name
      file = paths.File("data.path", name, folder / name)
      self.shards.append(token_files.read_header(file, Shard).header)
    self._documents: list[sources.EncodedDocument] = []
    self._gathered = 0

  def _path(self, suffix: str) -> epath.Path:
    """Of the next shard."""
    return self._folder / f"{self._split}-{len(self.shards):05d}.{suffix}"

  @property
  def next_document(self) -> int:
    """The first document that no complete shard covers."""
    return self.shards[-1].next_document if self.shards else 0

  def written(self) -> token_files.Split:
    """What the complete shards hold together."""
    documents, num_bytes, tokens = (
      sum(getattr(shard, name) for shard in self.shards)
      for name in ("documents", "bytes", "count")
    )
    names = (f"{self._split}-{i:05d}.bin" for i in range(len(self.shards)))
    return token_files.Split(documents, num_bytes, tokens, tuple(names))

  def add(self, document: sources.EncodedDocument) -> bool:
    """Takes a document; returns whether it completes a shard."""
    self._documents.append(document)
    self._gathered += len(document.ids)
    if self._gathered < self._shard_tokens:
      return False
    self.flush()
    return True

  def flush(self) -> None:
    """Writes a shard of the documents that no shard has yet."""
    if not self._documents:
      return
    ids = np.concatenate([document.ids for document in self._documents])
    content = ids.tobytes()
    shard = Shard(
      dtype=ids.dtype.name,  # pyrefly: ignore[bad-argument-type]
      count=len(ids),
      vocab_size=self._tokenizer["vocab_size"],
      separator_id=self._tokenizer["separator_id"],
      tokenizer=self._tokenizer,
      sha256=hashlib.sha256(content).hexdigest(),
      documents=len(self._documents),
      bytes=sum(len(document.text) for document in self._documents),
      next_document=self._documents[-1].number + 1,
    )
    files_lib.write(self._path("bin"), content)
    records.write(self._path("json"), shard)
    self.shards.append(shard)
    self._documents, self._gathered = [], 0


if __name__ == "__main__":
  sys.exit(main())
