# SPDX-License-Identifier: Apache-2.0
"""How a leaf of a network is laid out in files: one rule, both directions.

A leaf [*stack, *axes] is one tensor per index of its stack (sublayers, and
experts). Every tensor is a matrix [rows, columns], or a vector of rows. Rows
and columns are groups of the leaf's axes, flattened: a linear map W [out, in]
of PyTorch is the leaf [*in, *out], so its rows are the last axes.
"""

from collections.abc import Collection, Iterator, Sequence
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
  names: tuple[str, ...]
  stack: int = 0
  columns: int = 0
  transposed: bool = False
  ones: tuple[int, int, int] = (0, 0, 0)
  pad: int = 1
  packed: bool = False

  def stored(
    self, shape: Sequence[int]
  ) -> Iterator[tuple[str, tuple[int, ...], Collection[str]]]:
    """Name, shape and dtypes of all tensors, given the shape of the leaf."""
    whole = self.tensor_shape(shape)
    for name in self.names:
      if self.packed:
        yield from mxfp4.stored(name, whole)
      else:
        yield name, whole, tensor_files.DTYPES

  def tensor_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of each tensor, given that of the leaf."""
    rows, *columns = self._matrix_shape(shape[self.stack :])
    rows = -(-rows // self.pad) * self.pad
    before, between, after = ((1,) * count for count in self.ones)
    return (*before, rows, *between, *columns, *after)

  def read(
    self,
    tensors: Any,
    shape: Sequence[int],
    index: tuple[slice, ...],
    dtype: np.dtype,
  ) -> np.ndarray:
    """The part of the leaf at `index`, in `dtype`.

    Beside the result, one tensor's share of it exists in the file's dtype.

    Args:
      tensors: name -> `tensor_files.Tensor`.
      shape: of the leaf.
      index: a slice for each of its axes.
      dtype: of the result.
    """
    bounds = [slice(*s.indices(n)) for s, n in zip(index, shape, strict=True)]
    part = np.empty([s.stop - s.start for s in bounds], dtype)
    stacked, inner = bounds[: self.stack], bounds[self.stack :]
    sizes = shape[: self.stack]
    ranges = [range(s.start, s.stop) for s in stacked]
    for into, position in zip(
      itertools.product(*map(range, part.shape[: self.stack])),
      itertools.product(*ranges),
      strict=True,
    ):
      number = int(np.ravel_multi_index(position, sizes)) if sizes else 0
      name = self.names[number]
      part[into] = self._read_one(tensors, name, shape[self.stack :], inner)
    return part

  def _read_one(
    self,
    tensors: Any,
    name: str,
    shape: Sequence[int],
    index: Sequence[slice],
  ) -> np.ndarray:
    row_shape, column_shape = self._groups(shape)
    row_index, column_index = self._groups(index)
    rows, rows_left = _leading(row_shape, row_index)
    columns, columns_left = _leading(column_shape, column_index)
    matrix_shape = self._matrix_shape(shape)
    if self.packed:
      matrix = mxfp4.read(tensors, name, rows, columns)
    else:
      tensor = tensors[name]
      if self.pad > 1:
        self._check_padding(tensor, matrix_shape[0])
      flat = dataclasses.replace(tensor, shape=matrix_shape)
      matrix = flat.read(rows, columns)
    whole = matrix.reshape(
      *_partly(row_shape, row_index), *_partly(column_shape, column_index)
    )[(*rows_left, *columns_left)]
    return self._to_leaf(whole)

  def _check_padding(self, tensor: tensor_files.Tensor, used: int) -> None:
    rest = tensor.read(slice(used, tensor.shape[0]), slice(0, 1))
    if np.any(rest != 0):
      raise tensor_files.TensorFileError(
        f"{tensor.file}: tensor {tensor.name!r} is not zero after its first"
        f" {used} entries"
      )

  def _to_leaf(self, array: np.ndarray) -> np.ndarray:
    """[*rows, *columns] to the axes of the leaf."""
    if not self.transposed:
      return array
    order = np.roll(np.arange(array.ndim), self.columns)
    return array.transpose(order)

  def write(
    self, leaf: Any, shape: Sequence[int], dtype: str
  ) -> list[tensor_files.Entry]:
    """The tensors of a leaf; each is fetched when it is written."""
    tensor_shape = self.tensor_shape(shape)
    positions = itertools.product(*map(range, shape[: self.stack]))

    def make(position: tuple[int, ...]) -> np.ndarray:
      array = np.asarray(leaf[position])
      if self.transposed:
        order = np.roll(np.arange(array.ndim), -self.columns)
        array = array.transpose(order)
      if self.pad > 1:
        array = np.pad(array, (0, tensor_shape[0] - array.size))
      return array.reshape(tensor_shape)

    return [
      tensor_files.Entry(
        name, dtype, tensor_shape, lambda position=position: make(position)
      )
      for name, position in zip(self.names, positions, strict=True)
    ]

  def _matrix_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
    """Of a tensor, without the axes of size one; given a leaf's, unstacked."""
    rows, columns = self._groups(shape)
    return (math.prod(rows), *([math.prod(columns)] if self.columns else []))

  def _groups(self, axes: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """What belongs to rows and what to columns, of a value per axis."""
    if self.transposed:
      return axes[self.columns :], axes[: self.columns]
    cut = len(axes) - self.columns
    return axes[:cut], axes[cut:]


def _leading(
  shape: Sequence[int], index: Sequence[slice]
) -> tuple[slice, tuple[slice, ...]]:
  """A range of the flattened axes, and what to take of what it holds."""
  if not shape:
    return slice(0, 1), ()
  rest = math.prod(shape[1:])
  first = index[0]
  whole = slice(None)
  return slice(first.start * rest, first.stop * rest), (whole, *index[1:])


def _partly(shape: Sequence[int], index: Sequence[slice]) -> tuple[int, ...]:
  """The shape of such a range."""
  if not shape:
    return ()
  return (index[0].stop - index[0].start, *shape[1:])
