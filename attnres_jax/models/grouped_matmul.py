# SPDX-License-Identifier: Apache-2.0
"""The matrix product of sorted rows with a weight per group.

On TPU, `jax.lax.ragged_dot` multiplies rows, a kernel there that computes only
what is needed. With transposed weights, the compiler would first write a
transposed copy of all experts; and for gradients of weights, JAX 0.10 does E
times the work (JAX 0.12 has a kernel). Those two are Pallas kernels of JAX,
megablox, unless `tensor` splits the experts. On other platforms, `ragged_dot`
would fall back to masked products of all rows with all groups: E times the
work, and E times the memory of the rows. So there it is a loop over pieces of
groups. (tokamax has a `ragged_dot`, too, but cannot add to an existing gradient
in place, and another version of it for each of our Pythons.)
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
import jax.numpy as jnp

from attnres_jax.common import precision
from attnres_jax.common import sharding
from attnres_kernels import platforms

# Rows of a piece. Every group is rounded up to whole pieces: large pieces waste
# work, small pieces repeat reads of weights.
_PIECE = 64
_LANES = 128
# Bytes of an operand's tile in `_kernel_rows`, and the depth of a tile. Two
# tiles of each operand are on the core, where a kernel has 16 MiB.
_TILE_BYTES, _TILE_DEPTH = 3 * 2**20, 4096


def multiply(
  x_PI: jax.Array,
  weight: jax.Array,
  sizes_E: jax.Array,
  *,
  transposed: bool = False,
) -> jax.Array:
  """Rows times the weights [E, I, O], or [E, O, I] if transposed, of a group.

  No gradient rule. Groups may have fewer rows than P; the results of the others
  are undefined. Rows, weights and results [P, O] are of one dtype.
  """
  on_tpu = functools.partial(_ragged_rows, transposed=transposed)
  if transposed and fits_kernel(x_PI):
    on_tpu = _kernel_rows
  looped = functools.partial(_looped_rows, transposed=transposed)
  return platforms.by_platform((x_PI, weight, sizes_E), looped, tpu=on_tpu)


def weight_gradient(
  x_PD: jax.Array,
  dy_PF: jax.Array,
  sizes_E: jax.Array,
  existing: jax.Array | None = None,
) -> jax.Array:
  """The gradient of `multiply` by its weights: float32 [E, D, F].

  It is added to an existing one, in place where the compiler can.
  """
  on_tpu = _kernel_weights if fits_kernel(x_PD) else _ragged_weights
  operands = x_PD, dy_PF, sizes_E, existing
  return platforms.by_platform(operands, _looped_weights, tpu=on_tpu)


def _ragged_rows(
  x_PI: jax.Array, weight: jax.Array, sizes_E: jax.Array, *, transposed: bool
) -> jax.Array:
  dimensions = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2 if transposed else 1,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(0,),
  )
  return jax.lax.ragged_dot_general(
    x_PI, weight, sizes_E, dimensions, preferred_element_type=x_PI.dtype
  )


def fits_kernel(rows: jax.Array) -> bool:
  """Whether `megablox` takes them: no other dtypes, and nothing to split."""
  split = max(sharding.unsplit_axes().values(), default=1) > 1
  return not split and rows.dtype in (jnp.bfloat16, jnp.float32)


def _kernel_rows(
  x_PI: jax.Array, weight: jax.Array, sizes_E: jax.Array
) -> jax.Array:
  """Rows times weights [E, O, I]."""
  (rows, depth), width = x_PI.shape, weight.shape[1]
  (size, *_), missing = _tiles(rows, depth, width, sizes_E.shape[0])
  # If possible all of I: consecutive tiles of a group then read its weights
  # once.
  deep = min(depth, _TILE_DEPTH)
  fits = _TILE_BYTES // (deep * x_PI.dtype.itemsize)
  size = next(s for s in (size, 256, _LANES) if s <= fits)
  pieces = -(-width // fits)
  wide = min(width, -(-width // (pieces * _LANES)) * _LANES)
  y_PO = _call(
    gmm, jnp.pad(x_PI, ((0, missing), (0, 0))), weight, sizes_E,
    preferred_element_type=x_PI.dtype, tiling=(size, deep, wide),
    transpose_rhs=True,
  )  # fmt: skip
  return y_PO[:rows]


def _kernel_weights(
  x_PD: jax.Array,
  dy_PF: jax.Array,
  sizes_E: jax.Array,
  existing: jax.Array | None,
) -> jax.Array:
  rows, depth = x_PD.shape
  tiles, missing = _tiles(rows, depth, dy_PF.shape[1], sizes_E.shape[0])
  x_PD, dy_PF = (jnp.pad(a, ((0, missing), (0, 0))) for a in (x_PD, dy_PF))

  def kernel(x_PD, dy_PF, sizes_E, existing, **options):
    return tgmm(
      jnp.swapaxes(x_PD, 0, 1), dy_PF, sizes_E,
      existing_out=existing, **options,
    )  # fmt: skip

  return _call(
    kernel, x_PD, dy_PF, sizes_E, existing,
    preferred_element_type=jnp.float32, tiling=tiles,
  )  # fmt: skip


def _call(
  kernel: Callable[..., jax.Array], *operands: jax.Array | None, **options: Any
) -> jax.Array:
  """A kernel of `megablox` on the operands of one device."""

  def call(*operands):
    interpret = platforms.interpret_params() is not None
    with jax.numpy_dtype_promotion("standard"):  # It relies on that.
      return kernel(*operands, interpret=interpret, **options)

  return sharding.on_one_device(call)(*operands)


def _tiles(
  rows: int, depth: int, width: int, groups: int
) -> tuple[tuple[int, int, int], int]:
  """Rows, depth and width of a tile, and rows missing to whole tiles."""
  # Tiles with the end of a group inside are computed for both of its sides.
  few = (s for s in (512, 256) if 8 * s * groups <= rows and rows % s == 0)
  size = next(few, _LANES)
  return (size, _even(depth, 768), _even(width, 640)), -rows % size


def _even(size: int, most: int) -> int:
  """The size of tiles, as even as lanes allow: the last is computed in full."""
  count = -(-size // most)
  return size if count == 1 else -(-size // (count * _LANES)) * _LANES


def _ragged_weights(
  x_PD: jax.Array,
  dy_PF: jax.Array,
  sizes_E: jax.Array,
  existing: jax.Array | None,
) -> jax.Array:
  dimensions = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(),
  )
  wide = precision.wide(x_PD.dtype)
  dweight = jax.lax.ragged_dot_general(
    x_PD, dy_PF, sizes_E, dimensions, preferred_element_type=wide
  )
  return dweight if existing is None else existing + dweight


def _looped_rows(
  x_PI: jax.Array, weight: jax.Array, sizes_E: jax.Array, *, transposed: bool
) -> jax.Array:
  size = min(_PIECE, x_PI.shape[0])
  contract = (((1,), (1 if transposed else 0,)), ((), ()))
  padded = jnp.pad(x_PI, ((0, size), (0, 0)))
  wide = precision.wide(x_PI.dtype)

  def one_piece(group, start, _, y):
    # The next piece overwrites what a piece writes after the end of its group.
    x = jax.lax.dynamic_slice_in_dim(padded, start, size)
    piece = jax.lax.dot_general(
      x, weight[group], contract, preferred_element_type=wide
    )
    return jax.lax.dynamic_update_slice_in_dim(
      y, piece.astype(y.dtype), start, axis=0
    )

  width = weight.shape[1 if transposed else 2]
  y = jnp.zeros((padded.shape[0], width), x_PI.dtype)
  return _for_pieces(sizes_E, size, one_piece, y)[: x_PI.shape[0]]


def _looped_weights(
  x_PD: jax.Array,
  dy_PF: jax.Array,
  sizes_E: jax.Array,
  existing: jax.Array | None,
) -> jax.Array:
  size = min(_PIECE, x_PD.shape[0])
  wide = precision.wide(x_PD.dtype)
  x_padded, dy_padded = (jnp.pad(a, ((0, size), (0, 0))) for a in (x_PD, dy_PF))

  def one_piece(group, start, stop, dweight):
    x = jax.lax.dynamic_slice_in_dim(x_padded, start, size)
    dy = jax.lax.dynamic_slice_in_dim(dy_padded, start, size)
    inside = start + jnp.arange(size) < stop
    piece = jax.lax.dot_general(
      x,
      jnp.where(inside[:, None], dy, jnp.zeros((), dy.dtype)),
      (((0,), (0,)), ((), ())),
      preferred_element_type=wide,
    )
    return dweight.at[group].add(piece)

  shape = (*sizes_E.shape, x_PD.shape[1], dy_PF.shape[1])
  dweight = _for_pieces(sizes_E, size, one_piece, jnp.zeros(shape, wide))
  return dweight if existing is None else existing + dweight


def _for_pieces(
  sizes_E: jax.Array, size: int, body: Callable[..., Any], carry: Any
) -> Any:
  """Runs `body(group, start, stop, carry)` for every piece, in row order."""
  stops_E = jnp.cumsum(sizes_E)
  pieces_E = -(-sizes_E // size)
  last_pieces_E = jnp.cumsum(pieces_E)

  def one_piece(i, carry):
    # The first group that is not done yet; an empty group has no pieces.
    group = jnp.sum(last_pieces_E <= i)
    left = last_pieces_E[group] - i
    start = stops_E[group] - sizes_E[group] + (pieces_E[group] - left) * size
    return body(group, start, stops_E[group], carry)

  return jax.lax.fori_loop(0, last_pieces_E[-1], one_piece, carry)
