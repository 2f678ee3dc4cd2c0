# SPDX-License-Identifier: Apache-2.0
"""How a leaf of a network is laid out in files: one rule, both directions.

A leaf [*stack, *axes] is one tensor per index of its stack (sublayers, and
experts). Every tensor is a matrix [rows, columns], or a vector of rows. Rows
and columns are groups of the leaf's axes, flattened: a linear map W [out, in]
of PyTorch is the leaf [*in, *out], so its rows are the last axes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import Any

import numpy as np

from attnres_jax.interop import mxfp4
from attnres_jax.interop import tensor_files


@dataclasses.dataclass(frozen=True)
class Rule:
  """A leaf and its tensors.

  Attributes:
    leaf: its path, as in `trees.to_flat`.
    shape: of the leaf.
    names: of the tensors, in the order of the stack, flattened.
    stack: how many leading axes of the leaf are a stack.
    columns: how many of the other axes are columns. They come first if the
      tensor is `transposed`, else last.
    transposed: see `columns`.
    ones: how many axes of size one the tensor has before, between and after
      its rows and columns.
    pad: rows of the tensor are a multiple of this, with zeros at the end.
    packed: each name stands for two tensors, of codes in four bits and of their
      scales (`mxfp4`).
  """

  leaf: str
  shape: tuple[int, ...]
  names: tuple[str, ...]
  stack: int = 0
  columns: int = 0
  transposed: bool = False
  ones: tuple[int, int, int] = (0, 0, 0)
  pad: int = 1
  packed: bool = False

  def stored(self) -> Iterator[tuple[str, tuple[int, ...], Collection[str]]]:
    """Name, shape and dtypes of all tensors."""
    for name in self.names:
      if self.packed:
        yield from mxfp4.stored(name, self.tensor_shape)
      else:
        yield name, self.tensor_shape, tensor_files.DTYPES

  @property
  def tensor_shape(self) -> tuple[int, ...]:
    """The shape of each tensor."""
    rows, columns = self._groups(self.shape[self.stack :])
    count = -(-math.prod(rows) // self.pad) * self.pad
    before, between, after = ((1,) * count for count in self.ones)
    width = (math.prod(columns),) if self.columns else ()
    return (*before, count, *between, *width, *after)

  def read(
    self,
    tensors: Mapping[str, tensor_files.Tensor],
    index: tuple[slice, ...],
    dtype: np.dtype,
  ) -> np.ndarray:
    """The part of the leaf at `index`, a slice for each axis, in `dtype`.

    Beside the result, one tensor's share of it exists in the file's dtype.

    Raises:
      TensorFileError: a value is not finite, or a file ends too early.
    """
    bounds = [
      slice(*s.indices(n)) for s, n in zip(index, self.shape, strict=True)
    ]
    part = np.empty([s.stop - s.start for s in bounds], dtype)
    stacked, inner = bounds[: self.stack], bounds[self.stack :]
    sizes = self.shape[: self.stack]
    ranges = [range(s.start, s.stop) for s in stacked]
    for into, position in zip(
      itertools.product(*map(range, part.shape[: self.stack])),
      itertools.product(*ranges),
      strict=True,
    ):
      number = int(np.ravel_multi_index(position, sizes)) if sizes else 0
      name = self.names[number]
      with np.errstate(over="ignore", invalid="ignore"):
        part[into] = self._read_one(tensors, name, inner)
      if not np.isfinite(part[into]).all():
        name = mxfp4.scale_of(name) if self.packed else name
        words = f"tensor {name!r} has values that are not finite"
        tensor_files.fail(tensors[name].file, f"{words} in {part.dtype}")
    return part

  def _read_one(
    self,
    tensors: Mapping[str, tensor_files.Tensor],
    name: str,
    index: Sequence[slice],
  ) -> np.ndarray:
    row_shape, column_shape = self._groups(self.shape[self.stack :])
    row_index, column_index = self._groups(index)
    rows, rows_read, rows_left = _leading(row_shape, row_index)
    columns, columns_read, columns_left = _leading(column_shape, column_index)
    if self.packed:
      matrix = mxfp4.read(tensors, name, rows, columns)
    else:
      tensor, every = tensors[name], slice(None)
      before, between, after = ((every,) * count for count in self.ones)
      width = (columns,) if self.columns else ()
      matrix = tensor.read(*before, rows, *between, *width, *after)
      used = math.prod(row_shape)
      # The library does not read an empty part.
      if self.pad > 1 and used < tensor.shape[0]:
        if np.any(tensor.read(slice(used, tensor.shape[0])) != 0):
          words = f"is not zero after its first {used} entries"
          tensor_files.fail(tensor.file, f"tensor {name!r} {words}")
    block = matrix.reshape(*rows_read, *columns_read)
    block = block[(*rows_left, *columns_left)]
    return self._turned(block, self.columns)

  def _turned(self, array: np.ndarray, places: int) -> np.ndarray:
    """[*rows, *columns] with the columns first, or back, if transposed."""
    if not self.transposed:
      return array
    return array.transpose(np.roll(np.arange(array.ndim), places))

  def write(self, leaf: Any, dtype: str) -> list[tensor_files.Entry]:
    """The tensors of a leaf; each is fetched when it is written."""
    positions = itertools.product(*map(range, self.shape[: self.stack]))

    def make(position: tuple[int, ...]) -> np.ndarray:
      array = self._turned(np.asarray(leaf[position]), -self.columns)
      if self.pad > 1:
        array = np.pad(array, (0, self.tensor_shape[0] - array.size))
      return array.reshape(self.tensor_shape)

    return [
      tensor_files.Entry(
        name, dtype, self.tensor_shape, lambda position=position: make(position)
      )
      for name, position in zip(self.names, positions, strict=True)
    ]

  def _groups(self, axes: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """What belongs to rows and what to columns, of a value per axis."""
    if self.transposed:
      return axes[self.columns :], axes[: self.columns]
    cut = len(axes) - self.columns
    return axes[:cut], axes[cut:]


def _leading(
  shape: Sequence[int], index: Sequence[slice]
) -> tuple[slice, tuple[int, ...], tuple[slice, ...]]:
  """A range of the flattened axes, its shape, and which part of it to take."""
  if not shape:
    return slice(0, 1), (), ()
  rest, first = math.prod(shape[1:]), index[0]
  return (
    slice(first.start * rest, first.stop * rest),
    (first.stop - first.start, *shape[1:]),
    (slice(None), *index[1:]),
  )
