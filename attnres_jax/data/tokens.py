# SPDX-License-Identifier: Apache-2.0
"""A split of the data as one sequence of token ids with random access."""

import bisect
from collections.abc import Sequence
import itertools
from typing import Any

import numpy as np

from attnres_jax import config as config_lib


class DataError(config_lib.RunError):
  """The data has changed since it was opened."""


class Tokens:
  """Arrays of ids (in memory or in files) read as their concatenation.

  Attributes:
    vocab_size: every id is smaller; checked whenever ids are read.
    separator_id: the id that opens every document, or None if nothing does.
    description: describes and identifies the content; can be saved as JSON.
  """

  def __init__(
    self,
    arrays: Sequence[Any],
    *,
    vocab_size: int,
    separator_id: int | None,
    description: dict[str, Any],
  ):
    self._arrays = [array for array in arrays if len(array)]
    self._ends = list(itertools.accumulate(map(len, self._arrays)))
    self.vocab_size = vocab_size
    self.separator_id = separator_id
    self.description = description

  def __len__(self) -> int:
    return self._ends[-1] if self._ends else 0

  def read(self, start: int, stop: int) -> np.ndarray:
    """Ids from `start` up to `stop`, int32.

    Raises:
      IndexError: the range is not inside the data.
      DataError: an id is not in the vocabulary, or a file has changed.
    """
    if not 0 <= start <= stop <= len(self):
      raise IndexError(f"tokens [{start}, {stop}) of {len(self)}")
    pieces = []
    which = bisect.bisect_right(self._ends, start)
    position = start
    while position < stop:
      array, end = self._arrays[which], self._ends[which]
      first = end - len(array)
      upto = min(stop, end)
      pieces.append(array[position - first : upto - first])
      position, which = upto, which + 1
    ids = np.concatenate(pieces) if pieces else np.zeros(0, np.uint16)
    if ids.size and ids.max() >= self.vocab_size:
      raise DataError(
        f"token id {ids.max()} among tokens [{start}, {stop}): expected ids"
        f" below the vocabulary size {self.vocab_size}"
      )
    return ids.astype(np.int32)
