# SPDX-License-Identifier: Apache-2.0
"""What the Mosaic GPU kernels share: tokens, one at a time, on a warpgroup.

A grid of a few thread blocks per multiprocessor walks over all tokens. A
token's row [D] is seen as [D / V, V] and processed in tiles [128, V]: each of
the 128 threads holds V adjacent columns, in bfloat16 16 bytes with V = 8. A
first walk over the tiles adds up sums of products, each thread on its own. One
exchange between the threads then gives all sums of a token to every thread. A
second walk reads the rows again, from the nearest cache, and writes results.

If D is no multiple of a tile, the last tile ends where the row ends and
overlaps the previous one. Columns that are written twice get the same value;
sums count only what is `fresh`. Mosaic GPU has no masked loads.

The kernels are written lane by lane (`Lane` semantics), with every layout
given: inferring layouts takes time that grows with the square of the program.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
import operator
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

THREADS = 128
# Thread blocks of a grid: two for each of the multiprocessors of an H100. Each
# writes its share of gradients that are sums over tokens, so few are better.
BLOCKS = 264
# For sums of 32 products in one exchange.
_SCRATCH_BYTES = 32 * THREADS * 4
# Some names differ in the older jax that these kernels refuse.
_plgpu: Any = plgpu
_mgpu: Any = mgpu


# Below, plain JAX is faster: one thread block does not fill a multiprocessor.
_LEAST_TOKENS = 256


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


def why_slow(x_TD: jax.Array) -> str | None:
  """The reason why plain JAX is faster for these tokens, or None."""
  tokens = x_TD.size // max(1, x_TD.shape[-1])
  if tokens < _LEAST_TOKENS:
    return f"{tokens} tokens, where {_LEAST_TOKENS} keep a GPU busy"
  return None


def call(
  body: Callable[..., None],
  name: str,
  *,
  tokens: int,
  out_type: Any,
  scratch: Sequence[tuple[int, ...]],
  interpret: Any,
) -> Callable[..., Any]:
  """Runs `body(*refs)` in every thread block, see `each_token`.

  Args:
    body: gets operands, results, and the scratch.
    name: of the kernel.
    tokens: of the operands.
    out_type: of the results.
    scratch: shapes of float32 arrays in shared memory.
    interpret: the argument of `plgpu.kernel`.
  """
  body.__name__ = name
  options = {} if interpret is None else {"interpret": interpret}
  return _plgpu.kernel(
    body,
    out_type=out_type,
    grid=(min(BLOCKS, tokens),),
    grid_names=("program",),
    scratch_types=[_plgpu.SMEM(shape, jnp.float32) for shape in scratch],
    compiler_params=_plgpu.CompilerParams(
      reduction_scratch_bytes=_SCRATCH_BYTES,
      lowering_semantics=_mgpu.LoweringSemantics.Lane,
    ),
    **options,
  )


def each_token(tokens: int, body: Callable[[Any], None]) -> None:
  """Calls `body(token)` for the tokens of this thread block."""
  blocks = min(BLOCKS, tokens)
  first = jax.lax.axis_index("program")

  def step(i, carry):
    body(first + i * blocks)
    return carry

  jax.lax.fori_loop(0, (tokens - first + blocks - 1) // blocks, step, None)


class Tiles:
  """How a row of `width` columns is cut into tiles.

  Attributes:
    width: D.
    vector: adjacent columns held by one thread.
    padded: rows [vector] of all tiles; the last one may overlap.
  """

  def __init__(self, width: int):
    # Wide loads, but few columns that are computed twice.
    cost = lambda v: -(-width // (THREADS * v)) * (v + 1)
    fits = [v for v in (8, 4, 2, 1) if not width % v and THREADS * v <= width]
    self.width, self.vector = width, min(fits, key=cost)
    self._full, self._rest = divmod(width // self.vector, THREADS)
    self.padded = THREADS * (self._full + (self._rest > 0))

  @functools.cached_property
  def tile(self) -> Any:
    tiling = ((THREADS, self.vector), (32, self.vector))
    return _plgpu.Layout.TILED(_plgpu.Tiling(tiling), (-4,), (-2,), -1)

  @functools.cached_property
  def lanes(self) -> Any:
    """A number for each thread."""
    return self._matrix.reduce(0)

  @functools.cached_property
  def _matrix(self) -> Any:
    tiling = ((1, THREADS), (32,), (1,))
    return _plgpu.Layout.TILED(_plgpu.Tiling(tiling), (-3,), (-2,), -1)

  def view(self, x: jax.Array) -> jax.Array:
    """[*T, D] as [T, D / V, V]."""
    return x.reshape(-1, x.shape[-1] // self.vector, self.vector)

  def like(self, x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)

  def loop(self, body: Callable[..., Any], carry: Any) -> Any:
    """Runs `body(rows, place, fresh, carry)` over the tiles of a token.

    `rows` slices [D / V, V], and `place` an array of `padded` rows. `fresh` is
    1 for threads whose columns no earlier tile had and 0 for the others, or
    None if all are fresh.
    """

    def full(i, carry):
      rows = pl.ds(pl.multiple_of(i * THREADS, THREADS), THREADS)
      return body(rows, rows, None, carry)

    carry = jax.lax.fori_loop(0, self._full, full, carry)
    if not self._rest:
      return carry
    lane = _plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=self.lanes)
    fresh = jnp.where(lane >= THREADS - self._rest, 1.0, 0.0)
    start = self.width // self.vector - THREADS
    place = pl.ds(self._full * THREADS, THREADS)
    return body(pl.ds(start, THREADS), place, fresh, carry)

  def unpad(self, x: jax.Array) -> jax.Array:
    """[..., padded, V] of a loop's places as [..., D]."""
    full = self._full * THREADS
    parts = x[..., :full, :], x[..., self.padded - self._rest :, :]
    x = jnp.concatenate(parts, axis=-2) if self._rest else x
    return x.reshape(*x.shape[:-2], self.width)

  def sums(
    self, number: int, terms: Callable[[Any], Iterator[jax.Array]]
  ) -> list[jax.Array]:
    """Sums over all columns; `terms(rows)` yields `number` tiles."""

    def body(rows, place, fresh, totals):
      added = []
      for total, term in zip(totals, terms(rows), strict=True):
        lane = _plgpu.layout_cast(jnp.sum(term, axis=1), self.lanes)
        added.append(total + (lane if fresh is None else lane * fresh))
      return tuple(added)

    zero = _plgpu.layout_cast(jnp.zeros((THREADS,), jnp.float32), self.lanes)
    totals = self.loop(body, (zero,) * number)
    lines = [
      _plgpu.layout_cast(
        jax.lax.broadcast_in_dim(x, (1, THREADS), (1,)), self._matrix
      )
      for x in totals
    ]
    all_sums = jnp.sum(jnp.concatenate(lines, axis=0), axis=1)
    cut = lambda i: jax.lax.slice(all_sums, (i,), (i + 1,))
    return [jnp.sum(cut(i)) for i in range(number)]

  def load(self, ref: Any) -> jax.Array:
    """A tile in float32."""
    x = _plgpu.load(ref, layout=self.tile, optimized=False)
    return x.astype(jnp.float32)

  def store(self, ref: Any, x: jax.Array) -> None:
    _plgpu.store(ref, x.astype(ref.dtype), optimized=False)

  def clear(self, refs: Sequence[Any]) -> None:
    """Fills arrays [padded, V] of shared memory with zeros."""
    zero = jnp.zeros((THREADS, self.vector), jnp.float32)

    def body(rows, place, fresh, carry):
      for ref in refs:
        self.store(ref.at[place], _plgpu.layout_cast(zero, self.tile))

    self.loop(body, None)

  def copy(self, sources: Sequence[Any], targets: Sequence[Any]) -> None:
    """Writes arrays [padded, V] of shared memory to memory."""

    def body(rows, place, fresh, carry):
      for source, target in zip(sources, targets, strict=True):
        self.store(target.at[place], self.load(source.at[place]))

    self.loop(body, None)


def add(terms: Any) -> Any:
  """The sum; not `sum`, which adds to an integer."""
  return functools.reduce(operator.add, terms)


def groups(number: int, most: int) -> list[range]:
  """Equal shares of `range(number)`, each of at most `most`."""
  count = -(-number // max(1, most))
  ends = [i * number // count for i in range(count + 1)]
  return [range(a, b) for a, b in zip(ends, ends[1:])]
