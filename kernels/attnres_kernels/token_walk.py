# SPDX-License-Identifier: Apache-2.0
"""What the Mosaic GPU kernels share: tokens, one at a time, on a warpgroup.

A grid of a few thread blocks per multiprocessor walks over all tokens. A
token's row [D] is seen as [D / V, V], in tiles [128, V]: each of 128 threads
holds V adjacent columns. A first walk over the tiles adds up sums of products,
each thread on its own. One exchange then gives all sums of a token to every
thread. A second walk reads the rows again, from the nearest cache, and writes.

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
# Numbers of tiles that a thread holds at the same time.
NUMBERS = 40
# For sums of 32 products in one exchange.
_SCRATCH_BYTES = 32 * THREADS * 4
# Below, plain JAX is faster: one thread block does not fill a multiprocessor.
_LEAST_TOKENS = 256
# Some names differ in the older jax that these kernels refuse.
_plgpu: Any = plgpu
_mgpu: Any = mgpu


def why_not(
  width: int, arrays: Sequence[jax.Array], heads: int, rank: int | None
) -> str | None:
  """The reason why rows of this width and these dtypes cannot run, or None."""
  if heads > 1 or rank is not None:
    return f"one head with keys of the full width, got {heads=}, {rank=}"
  if jax.__version_info__ < (0, 12):
    # The first with `plgpu.store`: rows need not fill whole sectors of memory.
    return f"needs jax >= 0.12 for Mosaic GPU, this is {jax.__version__}"
  dtypes = sorted({str(x.dtype) for x in arrays})
  if not set(dtypes) <= {"bfloat16", "float32"}:
    return f"arrays must be bfloat16 or float32, got {dtypes}"
  if width < THREADS:
    return f"rows need at least {THREADS}, the threads of a group, got {width}"
  return None


def why_slow(function: str, *args: Any, **options: Any) -> str | None:
  """The reason why plain JAX is faster for these arguments, or None."""
  x_TD = args[1][0] if isinstance(args[1], tuple) else args[0]
  tokens = x_TD.size // max(1, x_TD.shape[-1])
  if tokens < _LEAST_TOKENS:
    return f"{tokens} tokens, where {_LEAST_TOKENS} keep a GPU busy"
  return None


def walk(
  body: Callable[..., None], name: str, tiles: "Tiles",
  arrays: Sequence[jax.Array], results: Sequence[Any], *,
  scratch: Sequence[tuple[int, ...]] = (), rows: int = 0, interpret: Any,
) -> list[jax.Array]:  # fmt: skip
  """Runs `body(token, given, made, held)` for every token of a kernel.

  `given`, `made` and `held` are references to the arrays, to the results, which
  are like `results` (the first is [T, D / V, V]), and to shared memory: float32
  arrays of the shapes `scratch`, and last sums over tokens, as many `rows` in
  the places of `Tiles.loop`. These are a further result, [rows, D]: every
  thread block writes its own, and XLA adds them, so results repeat exactly.
  """
  tokens = results[0].shape[0]
  blocks = min(BLOCKS, tokens)
  sums = [(rows, tiles.padded, tiles.vector)] * (rows > 0)
  like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
  like += [jax.ShapeDtypeStruct((blocks, *x), jnp.float32) for x in sums]

  def kernel(*refs):
    given, refs = refs[: len(arrays)], refs[len(arrays) :]
    made, (token_ref, *held) = refs[: len(like)], refs[len(like) :]
    first = jax.lax.axis_index("program")

    def step(i, carry):
      settle()
      token_ref[0] = first + i * blocks
      settle()
      body(lambda: token_ref[0], given, made[: len(results)], held)
      return carry

    jax.lax.fori_loop(0, (tokens - first + blocks - 1) // blocks, step, None)
    for i in range(rows):
      tiles.copy(held[-1].at[i], made[-1].at[first, i])

  kernel.__name__ = name
  *made, last = _plgpu.kernel(
    kernel,
    out_type=like,
    grid=(blocks,),
    grid_names=("program",),
    scratch_types=[
      _plgpu.SMEM((1,), jnp.int32),
      *(_plgpu.SMEM(shape, jnp.float32) for shape in (*scratch, *sums)),
    ],
    compiler_params=_plgpu.CompilerParams(
      reduction_scratch_bytes=_SCRATCH_BYTES,
      lowering_semantics=_mgpu.LoweringSemantics.Lane,
      unsafe_no_auto_barriers=True,  # see `settle`
    ),
    **({} if interpret is None else {"interpret": interpret}),
  )(*arrays)
  return [*made, tiles.unpad(jnp.sum(last, axis=0)) if rows else last]


def settle() -> None:
  """Waits until all threads have written and read shared memory.

  All write the same numbers. Across it, compilers keep none in registers.
  """
  _plgpu.commit_smem()


class Tiles:
  """How a row of `width` columns is cut into tiles.

  Attributes:
    width: D.
    vector: adjacent columns held by one thread.
    most: tiles that a thread should hold at the same time.
    padded: rows [vector] of all tiles; the last one may overlap.
    tile: the layout of a tile.
    lanes: the layout of a number for each thread.
  """

  def __init__(self, width: int, held: int = 1):
    # Wide loads, but few columns that are computed twice, and registers for
    # the `held` tiles that a thread has at the same time.
    cost = lambda v: -(-width // (THREADS * v)) * (v + 1)
    most = min(width // THREADS, max(1, NUMBERS // held))
    fits = [v for v in (8, 4, 2, 1) if not width % v and v <= most]
    self.width, self.vector = width, min(fits, key=cost)
    self._full, self._rest = divmod(width // self.vector, THREADS)
    self.most = max(1, NUMBERS // self.vector)
    self.padded = THREADS * (self._full + (self._rest > 0))
    tiled = lambda warps, *tiling: _plgpu.Layout.TILED(
      _plgpu.Tiling(tiling), (warps,), (-2,), -1
    )
    self.tile = tiled(-4, (THREADS, self.vector), (32, self.vector))
    self._matrix = tiled(-3, (1, THREADS), (32,), (1,))
    self.lanes = self._matrix.reduce(0)

  def view(self, x: jax.Array) -> jax.Array:
    """[*T, D] as [T, D / V, V]."""
    return x.reshape(-1, x.shape[-1] // self.vector, self.vector)

  def loop(self, body: Callable[..., Any], carry: Any) -> Any:
    """Runs `body(rows, place, fresh, carry)` over the tiles of a token.

    `rows` slices [D / V, V], and `place` an array of `padded` rows. `fresh` is
    1 for threads whose columns no earlier tile had and 0 for the others, or
    None if all are fresh.
    """
    last = self.width // self.vector - THREADS
    lane = _plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=self.lanes)

    def tile(i, carry):
      start = place = pl.multiple_of(i * THREADS, THREADS)
      fresh = None
      if self._rest:
        start = jnp.minimum(place, last)
        fresh = jnp.where(lane >= place - start, 1.0, 0.0)
      return body(pl.ds(start, THREADS), pl.ds(place, THREADS), fresh, carry)

    return jax.lax.fori_loop(0, self.padded // THREADS, tile, carry)

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
    line = lambda x: _plgpu.layout_cast(
      jax.lax.expand_dims(x, (0,)), self._matrix
    )
    lines = jnp.sum(jnp.concatenate(list(map(line, totals)), axis=0), axis=1)
    cut = lambda i: jax.lax.slice(lines, (i,), (i + 1,))
    return [jnp.sum(cut(i)) for i in range(number)]

  def load(self, ref: Any) -> jax.Array:
    """A tile in float32."""
    x = _plgpu.load(ref, layout=self.tile, optimized=False)
    return x.astype(jnp.float32)

  def store(self, ref: Any, x: jax.Array) -> None:
    _plgpu.store(ref, x.astype(ref.dtype), optimized=False)

  def accumulate(
    self, ref: Any, x: jax.Array, token: Any, first: bool = True
  ) -> None:
    """Adds to a sum, whose first term the first token of a block begins."""
    total = self.load(ref) + x
    self.store(ref, jnp.where(token < BLOCKS, x, total) if first else total)

  def copy(self, source: Any, target: Any) -> None:
    """Writes an array [padded, V] of shared memory to memory."""

    def body(rows, place, fresh, carry):
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
