# SPDX-License-Identifier: Apache-2.0
"""Gated experts on TPU, without hidden units in memory, and sums of their rows.

Rows are sorted by group: an expert, or for sums a tile of tokens. The grid goes
through pairs of a group and a tile of rows, with all matrices of the group in
VMEM. A tile with the end of a group inside is visited by both groups.

  forward    y = (w units(x G, x U)) V
  backward   computes the units again, and from them the gradients of x, w, and
             of the matrices, which are summed in VMEM over the rows of a group
  sum_rows   rows, sorted by token, times a matrix of zeros and ones

If the matrices of a group are too large, the grid goes through all rows for
each of a few slices of their hidden units.

Axes as in `attnres_jax.models.moe`, and S slices. Rows behind all groups are
undefined, in operands and results.
"""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata
import jax.numpy as jnp

from attnres_kernels import pallas_tpu_rows as tpu_rows
from attnres_kernels import platforms

# Hidden units from gate and up, float32.
Units = Callable[[jax.Array, jax.Array], jax.Array]

# Rows of a tile; the ends of groups are computed twice.
_ROWS = 128
# Rows and tokens of a step of `sum_rows`.
_SUMMED_ROWS, _SUMMED_TOKENS = 256, 128
_NAMES = "experts_forward", "experts_backward", "experts_sum_rows"


def num_slices(hidden: int, width: int, dtype: Any) -> int | None:
  """Of the hidden units, so that the backward pass fits; None if none does."""
  # Matrices in the dtype of x and their gradients, two buffers each.
  wide = -(-width // tpu_rows.LANES) * tpu_rows.LANES
  room = 3 / 4 * platforms.tpu_vmem_bytes()
  for slices in range(1, max(1, hidden // tpu_rows.ROWS) + 1):
    size = 3 * hidden // slices * wide * (jnp.dtype(dtype).itemsize + 4) * 2
    divides = slices == 1 or hidden % (slices * tpu_rows.ROWS) == 0
    if divides and size <= room:
      return slices
  return None


def forward(
  x_JD: jax.Array, weight_J: jax.Array, sizes_E: jax.Array,
  gate_and_up_EGFD: jax.Array, down_EFD: jax.Array, *, units: Units,
  filled: float = 1.0, interpret: Any = False,
) -> jax.Array:  # fmt: skip
  """The outputs of the experts, [J, D] in the dtype of x.

  Args:
    x_JD: rows, sorted by expert.
    weight_J: of the outputs, float32.
    sizes_E: number of rows of each expert.
    gate_and_up_EGFD: in the dtype of x, like the next.
    down_EFD: see above.
    units: hidden units from gate and up.
    filled: which part of the rows groups have, for the estimate of the cost.
    interpret: of `pallas_call`.
  """
  call = _Call(x_JD, sizes_E, down_EFD, filled, visit_empty=False)
  y_SJD = call(
    functools.partial(_forward_kernel, units=units),
    [call.rows, call.weights, call.gate_and_up, call.down],
    [call.sliced_rows],
    [jax.ShapeDtypeStruct((call.slices, *call.shape), x_JD.dtype)],
    [call.padded(x_JD), call.tiled(weight_J), gate_and_up_EGFD, down_EFD],
    name=_NAMES[0],
    flops=3,
    interpret=interpret,
  )[0]
  return _sum_slices(y_SJD, len(x_JD))


def backward(
  x_JD: jax.Array, weight_J: jax.Array, sizes_E: jax.Array,
  gate_and_up_EGFD: jax.Array, down_EFD: jax.Array, dy_JD: jax.Array,
  *existing: jax.Array, units: Units, filled: float = 1.0,
  interpret: Any = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
  """Gradients of x, of the weights, and of both matrices in float32.

  Args:
    x_JD: as in `forward`, like the next.
    weight_J: see above.
    sizes_E: see above.
    gate_and_up_EGFD: see above.
    down_EFD: see above.
    dy_JD: gradients of the outputs.
    *existing: gradients of both matrices, to which these are added in place.
    units: as in `forward`, like the next two.
    filled: see above.
    interpret: see above.
  """
  call = _Call(x_JD, sizes_E, down_EFD, filled, visit_empty=True)
  in_place = [pl.BlockSpec(memory_space=pl.ANY)] * len(existing)
  tiles = call.shape[0] // _ROWS
  wide = lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32)
  dx_SJD, dweight, *dmatrices = call(
    functools.partial(_backward_kernel, units=units),
    [
      call.rows, call.weights, call.gate_and_up, call.down, call.rows,
      *in_place,
    ],
    [call.sliced_rows, call.sliced_weights, call.gate_and_up, call.down],
    [
      jax.ShapeDtypeStruct((call.slices, *call.shape), x_JD.dtype),
      jax.ShapeDtypeStruct((call.slices, tiles, 1, _ROWS), jnp.float32),
      wide(gate_and_up_EGFD),
      wide(down_EFD),
    ],
    [
      call.padded(x_JD), call.tiled(weight_J), gate_and_up_EGFD, down_EFD,
      call.padded(dy_JD), *existing,
    ],
    aliases={8 + i: 2 + i for i in range(len(existing))},
    name=_NAMES[1],
    flops=8,
    interpret=interpret,
  )  # fmt: skip
  dweight_J = jnp.sum(dweight, axis=0).reshape(-1)[: len(x_JD)]
  return _sum_slices(dx_SJD, len(x_JD)), dweight_J, *dmatrices


def sum_rows(
  rows_JD: jax.Array, token_J: jax.Array, tokens: int, *,
  filled: float = 1.0, interpret: Any = False,
) -> jax.Array:  # fmt: skip
  """[A, D]: sums over the rows of each token, in float32 and rounded once.

  Args:
    rows_JD: sorted by token.
    token_J: of the rows, ascending; A for rows that do not count.
    tokens: A.
    filled: as in `forward`, like the next.
    interpret: see above.
  """
  width, dtype = rows_JD.shape[1], rows_JD.dtype
  missing = -len(rows_JD) % _SUMMED_ROWS
  rows_JD = jnp.pad(rows_JD, ((0, missing), (0, 0)))
  token_J = jnp.pad(token_J, (0, missing), constant_values=tokens)
  groups = -(-tokens // _SUMMED_TOKENS)
  edges = jnp.minimum(jnp.arange(groups + 1) * _SUMMED_TOKENS, tokens)
  stops = jnp.searchsorted(
    token_J, edges.astype(token_J.dtype), method="compare_all"
  )
  items, number = _items(
    jnp.diff(stops).astype(jnp.int32), len(rows_JD), _SUMMED_ROWS, True
  )
  tile = pl.BlockSpec((_SUMMED_TOKENS, width), lambda i, *s: (s[1][i], 0))
  exact = platforms.exact(rows_JD)
  block = _SUMMED_TOKENS * width * 4 + _SUMMED_ROWS * width * dtype.itemsize
  return pl.pallas_call(
    functools.partial(_sum_kernel, precision=exact),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(number,),
      in_specs=[
        pl.BlockSpec((_SUMMED_ROWS, width), lambda i, *s: (s[2][i], 0)),
        pl.BlockSpec((1, 1, _SUMMED_ROWS), lambda i, *s: (s[2][i], 0, 0)),
      ],
      out_specs=tile,
      scratch_shapes=[pltpu.VMEM((_SUMMED_TOKENS, width), jnp.float32)],
    ),
    out_shape=jax.ShapeDtypeStruct((tokens, width), dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("arbitrary",),
      vmem_limit_bytes=platforms.tpu_vmem_limit(block),
    ),
    cost_estimate=pl.CostEstimate(
      flops=2
      * _visited(rows_JD, filled, groups, _SUMMED_ROWS)
      * _SUMMED_TOKENS
      * width,
      bytes_accessed=(len(rows_JD) + tokens) * width * dtype.itemsize,
      transcendentals=0,
    ),
    interpret=interpret,
    name=_NAMES[2],
  )(*items, rows_JD, token_J.reshape(-1, 1, _SUMMED_ROWS))


class _Call:
  """Block specs and sizes of a kernel that visits pairs of expert and tile."""

  def __init__(
    self, x_JD: jax.Array, sizes_E: jax.Array, down_EFD: jax.Array,
    filled: float, *, visit_empty: bool,
  ):  # fmt: skip
    experts, hidden, width = down_EFD.shape
    slices = num_slices(hidden, width, x_JD.dtype)
    assert slices is not None  # The caller has asked.
    self.slices, self.hidden = slices, hidden // slices
    self.shape = x_JD.shape[0] + -x_JD.shape[0] % _ROWS, width
    self.dtype = x_JD.dtype
    self.visited = _visited(x_JD, filled, experts, _ROWS)
    self.items = _items(sizes_E, self.shape[0], _ROWS, visit_empty)
    # Of a grid step (s, i), and the experts and tiles of all i.
    row = lambda s, i, stops, experts, tiles: (tiles[i], 0)
    sliced = lambda s, i, stops, experts, tiles: (s, tiles[i], 0)
    expert = lambda s, i, stops, experts, tiles: (experts[i], s, 0)
    self.rows = pl.BlockSpec((_ROWS, width), row)
    self.weights = pl.BlockSpec((1, 1, _ROWS), lambda *a: (row(*a)[0], 0, 0))
    self.sliced_rows = pl.BlockSpec((1, _ROWS, width), sliced)
    self.sliced_weights = pl.BlockSpec(
      (1, 1, 1, _ROWS), lambda *a: (*sliced(*a)[:2], 0, 0)
    )
    self.gate_and_up = pl.BlockSpec(
      (1, 2, self.hidden, width), lambda *a: (expert(*a)[0], 0, a[0], 0)
    )
    self.down = pl.BlockSpec((1, self.hidden, width), expert)

  def padded(self, x_JD: jax.Array) -> jax.Array:
    return jnp.pad(x_JD, ((0, self.shape[0] - x_JD.shape[0]), (0, 0)))

  def tiled(self, weight_J: jax.Array) -> jax.Array:
    """Along lanes; a column would be padded to 128 of them."""
    missing = self.shape[0] - len(weight_J)
    return jnp.pad(weight_J, (0, missing)).reshape(-1, 1, _ROWS)

  def __call__(
    self, kernel: Callable[..., None], in_specs: Sequence[Any],
    out_specs: Sequence[Any], out_shape: Sequence[Any],
    operands: Sequence[jax.Array], *, name: str, flops: int, interpret: Any,
    aliases: Any = None,
  ) -> Sequence[jax.Array]:  # fmt: skip
    scalars, number = self.items
    lanes = lambda size: -(-size // tpu_rows.LANES) * tpu_rows.LANES
    blocks = sum(
      math.prod(spec.block_shape[:-1])
      * lanes(spec.block_shape[-1])
      * array.dtype.itemsize
      for spec, array in zip(
        (*in_specs, *out_specs), (*operands, *out_shape), strict=True
      )
      if spec.block_shape is not None
    )
    matrix = self.slices * lanes(self.hidden) * lanes(self.shape[1])
    nbytes = sum(a.size * a.dtype.itemsize for a in (*operands, *out_shape))
    return pl.pallas_call(
      kernel,
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(self.slices, number),
        in_specs=in_specs,
        out_specs=out_specs,
      ),
      out_shape=out_shape,
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("arbitrary", "arbitrary"),
        vmem_limit_bytes=platforms.tpu_vmem_limit(blocks),
      ),
      cost_estimate=pl.CostEstimate(
        flops=2 * flops * self.visited * matrix,
        bytes_accessed=nbytes,
        transcendentals=self.shape[0] * self.slices * self.hidden,
      ),
      input_output_aliases=aliases or {},
      interpret=interpret,
      name=name,
    )(*scalars, *operands)


def _items(
  sizes: jax.Array, rows: int, tile: int, visit_empty: bool
) -> tuple[Sequence[jax.Array], jax.Array]:
  """Edges of groups, the group and the tile of each grid step; their number."""
  with jax.numpy_dtype_promotion("standard"):  # It relies on that.
    return make_group_metadata(
      group_sizes=sizes, m=rows, tm=tile, start_group=jnp.int32(0),
      num_nonzero_groups=len(sizes), visit_empty_groups=visit_empty,
    )  # fmt: skip


def _visited(x: jax.Array, filled: float, groups: int, tile: int) -> int:
  """Rows of all steps; a tile with the end of a group is visited once more."""
  return int(filled * len(x)) + (groups - 1) * tile


def _sum_slices(y_SJD: jax.Array, rows: int) -> jax.Array:
  if len(y_SJD) > 1:
    y_SJD = jnp.sum(y_SJD, axis=0, keepdims=True, dtype=y_SJD.dtype)
  return y_SJD[0, :rows]


def _forward_kernel(
  edges: Any, experts: Any, tiles: Any, x_ref: Any, weight_ref: Any,
  gate_and_up_ref: Any, down_ref: Any, y_ref: Any, *, units: Units,
) -> None:  # fmt: skip
  i = pl.program_id(1)
  inside = _inside(edges, experts, tiles, i)
  x = x_ref[...]
  hidden = units(*_gate_and_up(x, gate_and_up_ref))
  hidden = (_column(weight_ref) * hidden).astype(x.dtype)
  y = _dot(hidden, down_ref[0]).astype(y_ref.dtype)
  y_ref[0] = jnp.where(inside, y, y_ref[0])


def _backward_kernel(
  edges: Any, experts: Any, tiles: Any, x_ref: Any, weight_ref: Any,
  gate_and_up_ref: Any, down_ref: Any, dy_ref: Any, *refs: Any, units: Units,
) -> None:  # fmt: skip
  *existing, dx_ref, dweight_ref, dgate_and_up_ref, ddown_ref = refs
  dmatrices = dgate_and_up_ref, ddown_ref
  part, i = pl.program_id(0), pl.program_id(1)
  group = experts[i]

  @pl.when((i == 0) | (group != experts[jnp.maximum(i - 1, 0)]))
  def _():
    # Of a group's first tile; blocks of results start undefined.
    for ref in dmatrices:
      ref[...] = jnp.zeros_like(ref)
    if existing:
      _copy_in(existing, dmatrices, group, part)

  inside = _inside(edges, experts, tiles, i)
  # Zero where the tile has rows of other groups or of none: so are their units
  # and all gradients.
  x, dy = (
    jnp.where(inside, ref[...].astype(jnp.float32), 0.0).astype(ref.dtype)
    for ref in (x_ref, dy_ref)
  )
  hidden, pull = jax.vjp(units, *_gate_and_up(x, gate_and_up_ref))
  dweighted = _dot(dy, down_ref[0], 1)
  weight = _column(weight_ref)
  dgate, dup = (a.astype(x.dtype) for a in pull(weight * dweighted))
  ddown_ref[0] += _dot((weight * hidden).astype(x.dtype), dy, 0, 0)
  dgate_and_up_ref[0, 0] += _dot(dgate, x, 0, 0)
  dgate_and_up_ref[0, 1] += _dot(dup, x, 0, 0)
  dx = _dot(dgate, gate_and_up_ref[0, 0]) + _dot(dup, gate_and_up_ref[0, 1])
  dx_ref[0] = jnp.where(inside, dx.astype(dx_ref.dtype), dx_ref[0])
  dweight = jnp.sum(dweighted * hidden, axis=1, keepdims=True)
  dweight = jnp.broadcast_to(dweight, (len(x), tpu_rows.LANES))
  row = _inside(edges, experts, tiles, i, axis=1)
  dweight_ref[0, 0] = jnp.where(
    row, jnp.transpose(dweight)[:1], dweight_ref[0, 0]
  )


def _copy_in(
  sources: Sequence[Any], refs: Sequence[Any], group: Any, part: Any
) -> None:
  """What is there of a group's slice; rare, so nothing hides it."""
  for source, ref in zip(sources, refs):
    hidden = ref.shape[-2]
    rows = pl.ds(pl.multiple_of(part * hidden, tpu_rows.ROWS), hidden)
    at = (pl.ds(group, 1), *[slice(None)] * (ref.ndim - 3), rows)
    pltpu.sync_copy(source.at[at], ref)


def _sum_kernel(
  edges: Any, groups: Any, tiles: Any, rows_ref: Any, token_ref: Any,
  sum_ref: Any, wide_ref: Any, *, precision: Any,
) -> None:  # fmt: skip
  i, group = pl.program_id(0), groups[pl.program_id(0)]

  @pl.when((i == 0) | (group != groups[jnp.maximum(i - 1, 0)]))
  def _():
    wide_ref[...] = jnp.zeros_like(wide_ref)

  # A row that does not count may be anything, also infinite.
  inside = _inside(edges, groups, tiles, i, size=_SUMMED_ROWS)
  rows = jnp.where(inside, rows_ref[...], jnp.zeros((), rows_ref.dtype))
  token = group * _SUMMED_TOKENS + tpu_rows.iota(
    (_SUMMED_TOKENS, _SUMMED_ROWS), 0
  )
  chosen = jnp.where(token == token_ref[0], 1.0, 0.0).astype(rows.dtype)
  wide_ref[...] += jax.lax.dot_general(
    chosen, rows, (((1,), (0,)), ((), ())), precision=precision,
    preferred_element_type=jnp.float32,
  )  # fmt: skip
  sum_ref[...] = wide_ref[...].astype(sum_ref.dtype)


def _inside(
  edges: Any, groups: Any, tiles: Any, i: Any, axis: int = 0,
  size: int = _ROWS,
) -> jax.Array:  # fmt: skip
  """Which rows of a step's tile are of its group, [size, 1] or [1, size]."""
  shape = (size, 1) if axis == 0 else (1, size)
  row = tiles[i] * size + tpu_rows.iota(shape, axis)
  return (row >= edges[groups[i]]) & (row < edges[groups[i] + 1])


def _gate_and_up(
  x: jax.Array, gate_and_up_ref: Any
) -> tuple[jax.Array, jax.Array]:
  gate, up = (_dot(x, gate_and_up_ref[0, g], 1) for g in range(2))
  return gate, up


def _dot(
  a: jax.Array, b: jax.Array, b_axis: int = 0, a_axis: int = 1
) -> jax.Array:
  exact = platforms.exact(a) is not None
  return tpu_rows.dot(a, b, b_axis, a_axis, exact=exact)


def _column(ref: Any) -> jax.Array:
  """[1, 1, rows] along lanes to [rows, 1]."""
  row = jnp.broadcast_to(ref[0], (tpu_rows.SUBLANES, ref.shape[-1]))
  return jnp.transpose(row)[:, :1]
