# SPDX-License-Identifier: Apache-2.0
"""Matrices in four bits (MXFP4), decoded while they are read.

Groups of 32 numbers of a row share a power of two. A number is a sign and one
of eight magnitudes; two are in a byte, the first in its lower half. So a matrix
[rows, columns] is `NAME_packed` [rows, columns / 2] and `NAME_scale` [rows,
columns / 32], both bytes (spec: interop section 1).
"""

from collections.abc import Collection, Iterator, Mapping

import ml_dtypes
import numpy as np

from attnres_jax.interop import tensor_files

GROUP = 32
_PACKED, _SCALE = "_packed", "_scale"
_BYTES = ("U8",)


def is_packed(name: str, tensors: Collection[str]) -> bool:
  """Whether a matrix of this name is stored in this way."""
  return name not in tensors and name + _PACKED in tensors


def scale_of(name: str) -> str:
  """The tensor with the scales of a matrix."""
  return name + _SCALE


def stored(
  name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...], Collection[str]]]:
  """Name, shape and dtypes of both tensors of a matrix [rows, columns].

  Raises:
    TensorFileError: the columns are not whole groups.
  """
  rows, columns = shape
  if columns % GROUP:
    raise tensor_files.TensorFileError(
      f"tensor {name + _PACKED!r}: {columns} columns, not groups of {GROUP}"
    )
  yield name + _PACKED, (rows, columns // 2), _BYTES
  yield name + _SCALE, (rows, columns // GROUP), _BYTES


def read(
  tensors: Mapping[str, tensor_files.Tensor],
  name: str,
  rows: slice,
  columns: slice,
) -> np.ndarray:
  """A part of a matrix, float32, of which only these groups are read.

  Raises:
    TensorFileError: a file ends too early.
  """
  first = columns.start // GROUP
  last = -(-columns.stop // GROUP)
  packed = tensors[name + _PACKED].read(
    rows, slice(first * GROUP // 2, last * GROUP // 2)
  )
  scales = tensors[name + _SCALE].read(rows, slice(first, last))
  weight = decode(packed, scales)
  return weight[:, columns.start - first * GROUP : columns.stop - first * GROUP]


def decode(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """uint8 [R, C / 2] and [R, C / 32] to float32 [R, C].

  A scale that is no number gives such values.
  """
  codes = np.stack([packed & 15, packed >> 4], axis=-1)
  values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
  powers = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
  groups = values.reshape(len(packed), -1, GROUP) * powers[..., None]
  return groups.reshape(len(packed), -1)
