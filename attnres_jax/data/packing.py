# SPDX-License-Identifier: Apache-2.0
"""Documents packed into rows of T+1 tokens.

All documents of a split are concatenated, each preceded by a separator, and a
separator ends the last one. Row r holds tokens r T to r T + T inclusive: T
inputs and, shifted by one, T targets. Adjacent rows share one token, the last
target of one and the first input of the next. The last row is padded, and its
padding does not count. So every token except the very first is predicted
exactly once per epoch, and with it the end of every document.

A separator ends a document as a target and opens the next one as an input. So
with segment ids, too, each token of a document and its end are predicted, from
this document alone.
"""

import bisect
from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any

import numpy as np

from attnres_jax import config as config_lib

Row = dict[str, np.ndarray]


class DataError(config_lib.RunError):
  """The data has changed since it was opened."""


@dataclasses.dataclass
class Tokens:
  """Arrays of ids (in memory or in files) read as their concatenation.

  Every id is below the vocabulary size, which is checked whenever ids are read.
  The separator opens every document; None if nothing does. The description
  identifies the content, and can be saved as JSON.
  """

  arrays: Sequence[Any]
  vocab_size: int
  separator_id: int | None
  description: dict[str, Any]

  def __post_init__(self):
    self._arrays = [array for array in self.arrays if len(array)]
    self._ends = list(itertools.accumulate(map(len, self._arrays)))

  def __len__(self) -> int:
    return self._ends[-1] if self._ends else 0

  def read(self, start: int, stop: int) -> np.ndarray:
    """Ids from `start` up to `stop`, int32.

    Raises:
      DataError: an id is not in the vocabulary, or a file has changed.
    """
    pieces = [np.zeros(0, np.uint16)]
    which = bisect.bisect_right(self._ends, start)
    position = start
    while position < stop:
      array, end = self._arrays[which], self._ends[which]
      first = end - len(array)
      pieces.append(array[position - first : min(stop, end) - first])
      position, which = end, which + 1
    ids = np.concatenate(pieces)
    if ids.size and ids.max() >= self.vocab_size:
      raise DataError(
        f"token id {ids.max()} among tokens [{start}, {stop}): expected ids"
        f" below the vocabulary size {self.vocab_size}"
      )
    return ids.astype(np.int32)


class PackedRows:
  """Random access to packed rows, the source of a `grain.MapDataset`."""

  def __init__(
    self, tokens: Tokens, sequence_length: int, *, segment_ids: bool = False
  ):
    """Rows of T = `sequence_length` targets; segment ids need a separator."""
    self._tokens = tokens
    self._length = sequence_length
    self._segment_ids = segment_ids
    # What follows the last token: the separator that ends its document.
    self._end: list[int | None] = []
    if len(tokens) and tokens.separator_id is not None:
      if tokens.read(len(tokens) - 1, len(tokens))[0] != tokens.separator_id:
        self._end = [tokens.separator_id]

  def __len__(self) -> int:
    targets = len(self._tokens) + len(self._end) - 1
    return max(0, -(-targets // self._length))

  def __getitem__(self, index: int) -> Row:
    """A row of int32 [T+1] arrays.

    Returns:
      "tokens"; "counts", which is 1 for tokens to learn as targets, else 0;
      and, if requested, "segment_ids" from 1, with 0 for padding.
    """
    if not 0 <= index < len(self):
      raise IndexError(f"row {index} of {len(self)}")
    start, size = index * self._length, self._length + 1
    ids = self._tokens.read(start, min(start + size, len(self._tokens)))
    if len(ids) < size:
      ids = np.append(ids, np.asarray(self._end, np.int32))
    separator = self._tokens.separator_id or 0
    row = padding_row(size, separator, self._segment_ids)
    row["tokens"][: len(ids)] = ids
    row["counts"][: len(ids)] = 1
    if self._segment_ids:
      opened = np.cumsum(ids == separator, dtype=np.int32)
      row["segment_ids"][: len(ids)] = opened - opened[0] + 1
    return row


def padding_row(size: int, token: int, segment_ids: bool) -> Row:
  """A row of `size` tokens that do not count."""
  names = ["counts"] + ["segment_ids"] * segment_ids
  row = {name: np.zeros(size, np.int32) for name in names}
  return row | {"tokens": np.full(size, token, np.int32)}
