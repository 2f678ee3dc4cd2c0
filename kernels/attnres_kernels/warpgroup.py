# SPDX-License-Identifier: Apache-2.0
"""What the Mosaic GPU kernels share: rows of any width on one warpgroup.

A row is processed in tiles. Each of the 128 threads holds `vector` adjacent
columns of a tile, the same ones for every row of a matrix. So a sum over rows
stays inside a thread, and sums over columns take one exchange between threads
for all rows of a matrix at once. In terms of Mosaic GPU:

  matrix [R, size]   one row per register group, columns over lanes and warps
  row [size]         the same columns, no row axis
  statistics [R]     one number per row, known to every thread

Widths need not be multiples of a tile: the last tile ends where the row ends
and overlaps the previous one. Columns that are written twice get the same
value, from the same thread block; sums count only the columns that are `fresh`.
Mosaic GPU has no masked loads, and its bulk copies, which could stop at the
edge of an array, require rows that are multiples of 16 bytes. Rows narrower
than 128 are refused.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

THREADS = 128
# Some names differ in the older jax that these kernels refuse.
_plgpu: Any = plgpu


def why_not(
  width: int, arrays: Sequence[jax.Array], heads: int, rank: int | None
) -> str | None:
  """The reason why rows of this width and these dtypes cannot run, or None."""
  if heads > 1 or rank is not None:
    return f"one head with keys of the full width, got {heads=}, {rank=}"
  if jax.__version_info__ < (0, 12):
    # The first version with `plgpu.store`: rows need not fill whole sectors of
    # memory.
    return f"needs jax >= 0.12 for Mosaic GPU, this is {jax.__version__}"
  dtypes = sorted({str(x.dtype) for x in arrays})
  if not set(dtypes) <= {"bfloat16", "float32"}:
    return f"arrays must be bfloat16 or float32, got {dtypes}"
  if width < THREADS:
    return f"rows need at least {THREADS}, the threads of a group, got {width}"
  return None


def flatten(x_TD: jax.Array) -> jax.Array:
  """[*T, D] to [T, D]."""
  return x_TD.reshape(-1, x_TD.shape[-1])


def call(
  body: Callable[..., None],
  name: str,
  *,
  out_type: Any,
  grid: int,
  interpret: Any,
) -> Callable[..., Any]:
  """`plgpu.kernel` on a grid of one axis, called "program"."""
  body.__name__ = name
  options = {} if interpret is None else {"interpret": interpret}
  return _plgpu.kernel(
    body,
    out_type=out_type,
    grid=(grid,),
    grid_names=("program",),
    # Eight rows are summed over columns in one exchange.
    compiler_params=_plgpu.CompilerParams(
      reduction_scratch_bytes=8 * THREADS * 4
    ),
    **options,
  )


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


class Tiles:
  """How a row of `width` columns is cut into tiles.

  Attributes:
    width: D.
    vector: adjacent columns held by one thread; pairs where rows are aligned.
    size: columns of a tile.
  """

  def __init__(self, width: int):
    self.width = width
    self.vector = 2 if width % 2 == 0 and width >= 2 * THREADS else 1
    self.size = THREADS * self.vector
    self._full = width // self.size
    self._rest = width % self.size

  @functools.cached_property
  def matrix(self) -> Any:
    vector = self.vector
    tiling = ((1, THREADS * vector), (32 * vector,), (vector,))
    return _plgpu.Layout.TILED(_plgpu.Tiling(tiling), (-3,), (-2,), -1)

  @functools.cached_property
  def row(self) -> Any:
    return self.matrix.reduce(0)

  def loop(self, body: Callable[..., Any], carry: Any) -> Any:
    """Runs `body(columns, fresh, carry)` over the tiles of a row.

    `columns` slices a row; `fresh` is 1 for columns that were not in an earlier
    tile and 0 for the others, or None if all are fresh.
    """

    def full(tile, carry):
      start = pl.multiple_of(tile * self.size, self.size)
      return body(pl.ds(start, self.size), None, carry)

    carry = jax.lax.fori_loop(0, self._full, full, carry)
    if not self._rest:
      return carry
    column = _plgpu.broadcasted_iota(
      jnp.int32, (self.size,), 0, layout=self.row
    )
    fresh = jnp.where(column >= self.size - self._rest, 1.0, 0.0)
    columns = pl.ds(self.width - self.size, self.size)
    return body(columns, fresh, carry)

  def sums(
    self, terms: Callable[[Any], tuple[jax.Array, ...]], number: int
  ) -> tuple[jax.Array, ...]:
    """Sums of `number` rows over all columns; `terms(columns)` gives tiles."""

    def body(columns, fresh, totals):
      return tuple(
        total + masked(term, fresh)
        for total, term in zip(totals, terms(columns), strict=True)
      )

    totals = self.loop(body, (self.zeros(),) * number)
    return tuple(jnp.sum(total) for total in totals)

  def zeros(self, rows: int | None = None) -> jax.Array:
    """A tile of zeros: a row, or a matrix."""
    if rows is None:
      return _plgpu.layout_cast(jnp.zeros((self.size,), jnp.float32), self.row)
    zeros = jnp.zeros((rows, self.size), jnp.float32)
    return _plgpu.layout_cast(zeros, self.matrix)

  def load(self, ref: Any) -> jax.Array:
    """A tile (a row, or a matrix) in float32."""
    layout = self.row if len(ref.shape) == 1 else self.matrix
    x = _plgpu.load(ref, layout=layout, optimized=False)
    return x.astype(jnp.float32)

  def down(self, row: jax.Array, rows: int) -> jax.Array:
    """Repeats a row for every row of a matrix."""
    wide = jax.lax.broadcast_in_dim(row, (rows, self.size), (1,))
    return _plgpu.layout_cast(wide, self.matrix)

  def across(self, stats: jax.Array) -> jax.Array:
    """Repeats the number of each row over its columns."""
    wide = jax.lax.broadcast_in_dim(stats, (stats.shape[0], self.size), (0,))
    return _plgpu.layout_cast(wide, self.matrix)


def store(ref: Any, x: jax.Array) -> None:
  _plgpu.store(ref, x.astype(ref.dtype), optimized=False)


def masked(x: jax.Array, fresh: jax.Array | None) -> jax.Array:
  """Keeps x where `fresh` is 1 (or None), else 0."""
  return x if fresh is None else x * fresh
