# SPDX-License-Identifier: Apache-2.0
"""Documents packed into rows of T+1 tokens, without padding.

All documents of a split are concatenated, each preceded by a separator. Row r
holds tokens r T to r T + T inclusive: T inputs and, shifted by one, T targets.
Adjacent rows share one token, the last target of one and the first input of the
next, so every token except the very first is predicted exactly once per epoch.
The incomplete row at the end is dropped.

The separator belongs to the document that follows: with segment ids, the first
token of a document is predicted from its separator alone.
"""

import numpy as np

from attnres_jax.data import tokens as tokens_lib


class PackedRows:
  """Random access to packed rows, the source of a `grain.MapDataset`."""

  def __init__(
    self,
    tokens: tokens_lib.Tokens,
    sequence_length: int,
    *,
    segment_ids: bool = False,
  ):
    """Rows of `tokens`.

    Args:
      tokens: the concatenated documents.
      sequence_length: T, targets per row.
      segment_ids: whether to number the documents of a row; needs a separator.
    """
    if segment_ids and tokens.separator_id is None:
      raise ValueError("segment ids need tokens with a separator")
    self._tokens = tokens
    self._length = sequence_length
    self._separator_id = tokens.separator_id if segment_ids else None

  def __len__(self) -> int:
    return max(0, len(self._tokens) - 1) // self._length

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    """{"tokens": int32 [T+1]} and, if requested, "segment_ids" likewise."""
    if not 0 <= index < len(self):
      raise IndexError(f"row {index} of {len(self)}")
    start = index * self._length
    ids = self._tokens.read(start, start + self._length + 1)
    if self._separator_id is None:
      return {"tokens": ids}
    return {
      "tokens": ids,
      "segment_ids": number_documents(ids, self._separator_id),
    }


def number_documents(ids: np.ndarray, separator_id: int) -> np.ndarray:
  """Numbers the documents of a row from 1; 0 means padding."""
  opened = np.cumsum(ids == separator_id, dtype=np.int32)
  return opened - opened[0] + np.int32(1)
