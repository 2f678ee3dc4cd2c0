# SPDX-License-Identifier: Apache-2.0
"""Turns a config into batches: shuffle, repeat, batch, slice per process.

The order is one `grain.MapDataset` over packed rows. Training shuffles all rows
of an epoch, differently in every epoch, without end. Validation is one pass in
an order that is always the same; rows of padding fill its last batch, so that
every row counts whatever the batch size. Batch n depends only on the data,
`seed` and n. So the position is one number, resuming is immediate, and
processes take parts of one global batch.

A mixture shuffles each of its paths by itself and takes rows of all of them in
turns, in proportion to `weights`, which grain rounds by less than a hundredth
of the smallest. Which path a row comes from depends on its number alone.

Threads read rows ahead; copying ids out of a file needs no worker processes.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.data import documents
from attnres_jax.data import packing
from attnres_jax.data import sources
from attnres_jax.data import tokenizer as tokenizer_lib

if TYPE_CHECKING:
  import grain  # With Orbax and TensorStore, 2 s: imported by the first batch.

Batch = dict[str, np.ndarray]

# Validation losses are only comparable in the same order.
_VALIDATION_SEED = 0
_READ_AHEAD_BATCHES = 8
# Of the rows that packing makes of the same tokens. Positions in rows of the
# first kind, which had no padding, mean other rows.
_PACKING = 2


def open_dataset(
  config: config_lib.DataConfig,
  split: str,
  *,
  process_index: int = 0,
  process_count: int = 1,
) -> "Dataset":
  """Opens a split and checks everything that can be checked without a device.

  This process gets one of `process_count` parts of each global batch.

  Raises:
    ConfigError: naming the field, its value and what is accepted.
    ImportError: an optional library is missing; says what to install.
  """
  if config.batch_size % process_count:
    config_lib.fail(
      "data.batch_size",
      config.batch_size,
      f"a multiple of the number of processes, {process_count}",
    )
  opener = config_lib.choose("data.source", config.source, sources.SOURCES)
  tokenizer = tokenizer_lib.make_tokenizer(config)
  each = config.each_path()
  if split == documents.VALIDATION and config.validation_path:
    each = each[:1]  # It has a path of its own.
  parts = []
  for path_config in each:
    parts.append(opener(path_config, split, tokenizer))
    _check_size(path_config, split, parts[-1])
  return Dataset(
    config, split, parts, tokenizer.describe(), process_index, process_count
  )


@dataclasses.dataclass
class Dataset:
  """A split of the data, opened; `batches` reads it.

  Attributes:
    num_rows: rows of one epoch; of a mixture, until one part would repeat.
    num_tokens: ids of the split, including separators.
    part_tokens: the same for each path of a mixture.
    num_batches: global batches of one epoch, the last one maybe padded.
  """

  _config: config_lib.DataConfig
  _split: str
  _parts: Sequence[packing.Tokens]
  _tokenizer: dict[str, Any]
  _process_index: int
  _process_count: int

  def __post_init__(self):
    self.num_rows = len(self._shuffled(repeated=False))
    self.part_tokens = [len(part) for part in self._parts]
    self.num_tokens = sum(self.part_tokens)
    self.num_batches = -(-self.num_rows // self._config.batch_size)

  def describe(self) -> dict[str, Any]:
    """A description of the data for the run's folder; can be saved as JSON."""
    return self._content() | {
      "tokenizer": self._tokenizer,
      "tokens": self.num_tokens,
      "rows": self.num_rows,
      "fingerprint": self.identity()["content"],
    }

  def identity(self) -> dict[str, Any]:
    """What batch n depends on besides n; independent of the processes."""
    content = json.dumps(
      [self._content(), self._tokenizer, self.num_tokens, _PACKING],
      sort_keys=True,
    )
    batches = config_lib.affecting(self._config, "batches")
    if self._split != documents.TRAIN:
      batches["seed"] = None
    return {
      "content": hashlib.sha256(content.encode()).hexdigest()[:16],
      "split": self._split,
    } | batches

  def batches(self) -> "Batches":
    """Iterates over the rows of this process."""
    import grain

    config, is_train = self._config, self._split == documents.TRAIN
    rows = self._shuffled(repeated=is_train)
    if not is_train:
      padding = packing.padding_row(
        config.sequence_length + 1,
        self._parts[0].separator_id or 0,
        config.segment_ids,
      )
      missing = self.num_batches * config.batch_size - self.num_rows
      if missing:
        rows = grain.MapDataset.concatenate(
          [rows, grain.MapDataset.source([padding] * missing)]
        )
    # Every P-th group of consecutive rows belongs to this process: the groups
    # of all processes, in order, form the global batch.
    local = rows.batch(
      config.batch_size // self._process_count, drop_remainder=True
    )
    local = local[self._process_index :: self._process_count]
    threads = config.num_threads
    options = grain.ReadOptions(
      num_threads=threads,
      prefetch_buffer_size=_READ_AHEAD_BATCHES if threads else 0,
    )
    iterator = iter(local.to_iter_dataset(options))
    return Batches(iterator, self.identity())

  def _content(self) -> dict[str, Any]:
    """A description of all parts; that of one part has no weights."""
    if len(self._parts) == 1:
      return self._parts[0].description
    weights = self._config.weights
    each = [
      part.description | {"weight": weight}
      for part, weight in zip(self._parts, weights)
    ]
    return {"source": self._config.source, "mixture": each}

  def _shuffled(self, repeated: bool) -> "grain.MapDataset":
    """All rows in order, without end or once."""
    import grain

    config = self._config
    first = config.seed if self._split == documents.TRAIN else _VALIDATION_SEED
    parts = []
    for i, tokens in enumerate(self._parts):
      packed = packing.PackedRows(
        tokens, config.sequence_length, segment_ids=config.segment_ids
      )
      rows = grain.MapDataset.source(packed).seed((first + i) % 2**32).shuffle()
      parts.append(rows.repeat() if repeated else rows)
    if len(parts) == 1:
      return parts[0]
    return grain.MapDataset.mix(parts, config.weights)


class Batches:
  """An iterator of numpy batches whose position can be saved.

  A batch has "tokens" and "counts", int32 [B, T+1], and, with
  `config.segment_ids`, "segment_ids" of the same shape. Counts are 1 for tokens
  that the loss counts as targets, and 0 for padding.
  """

  def __init__(
    self, iterator: "grain.DatasetIterator", identity: Mapping[str, Any]
  ):
    self._iterator = iterator
    self._identity = dict(identity)

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    try:
      return next(self._iterator)
    except packing.DataError as error:
      # Without what grain adds to it.
      raise packing.DataError(str(error)) from None

  def get_state(self) -> dict[str, Any]:
    """The next global batch and its data; can be saved as JSON."""
    return {
      "next_batch": self._iterator.get_state()["next_index"],
      "dataset": dict(self._identity),
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues from a saved state, on any number of processes; immediately.

    Raises:
      ValueError: the state belongs to other data, or to another batch size, row
        length or seed, for which its position has a different meaning.
    """
    saved = state["dataset"]
    differing = [
      f"{name} (saved {saved[name]!r}, now {value!r})"
      for name, value in self._identity.items()
      if saved.get(name, value) != value
    ]
    if differing:
      listed = ", ".join(differing)
      raise ValueError(f"data position: of other data, differing in {listed}")
    self._iterator.set_state({"next_index": state["next_batch"]})

  def close(self) -> None:
    """Ends the read-ahead threads."""
    self._iterator.close()


def _check_size(
  config: config_lib.DataConfig, split: str, tokens: packing.Tokens
) -> None:
  if config.segment_ids and tokens.separator_id is None:
    config_lib.fail(
      "data.segment_ids", True, 'token files that declare a "separator_id"'
    )
  if not len(tokens):
    is_separate = split == documents.VALIDATION and config.validation_path
    name = "validation_path" if is_separate else "path"
    if config.source == "tokens" or config.validation_path:
      accepted = f"any {split} tokens at all"
      config_lib.fail(f"data.{name}", getattr(config, name), accepted)
    config_lib.fail(
      "data.validation_fraction",
      config.validation_fraction,
      f"a fraction that leaves the {split} split any documents at all",
    )
  if split == documents.VALIDATION:
    return  # One padded row is enough.
  if config.sequence_length >= len(tokens):
    config_lib.fail(
      "data.sequence_length",
      config.sequence_length,
      f"less than the {len(tokens)} tokens to train on in"
      f" {config.path or config.source}",
    )
