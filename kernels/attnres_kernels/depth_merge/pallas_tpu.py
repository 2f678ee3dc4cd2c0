# SPDX-License-Identifier: Apache-2.0
"""Phase 2 on TPU: add, score, merge and pre-norm in one pass over memory.

Plain vector operations on 16 rows at a time, in float32; every array is read
and written once. Per-token statistics are stored along lanes, [tiles, 1,
tokens], because a [tokens, 1] array would be padded to 128 lanes in memory.
"""

import functools
import itertools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels import dispatch
from attnres_kernels.depth_merge import xla
from attnres_kernels.depth_merge.pallas_tpu_columns import Columns

ROWS = 16
_BUFFER_SHARE = 3 / 7  # Of VMEM.
_LANES = 128
SUBLANES = 8


def why_not(function, *args, eps, norm_eps, heads=1, rank=None):
  """The reason why these arguments cannot run, or None."""
  del function, eps, norm_eps, rank
  if heads > _LANES:
    return f"at most {_LANES} heads, got {heads}"
  dtypes = {str(x.dtype) for x in jax.tree.leaves(args) if x.ndim}
  if not dtypes <= {"bfloat16", "float32"}:
    return f"arrays must be bfloat16 or float32, got {sorted(dtypes)}"
  return None


def forward(
  out_TD,
  lse_T,
  query_D,
  partial_TD,
  update_TD,
  gain_D,
  rows=(None, None),
  *,
  eps,
  norm_eps,
  heads=1,
  rank=None,
  interpret=False,
):
  """Returns (new partial or None, merged or merged and normed)."""
  wide = [x for x in (out_TD, partial_TD, update_TD) if x is not None]
  written = [out_TD] if update_TD is None else [partial_TD, out_TD]
  call = Call([*wide, *written])
  columns = Columns(call.width, heads, rank)
  vectors = columns.vectors(query_D, gain_D)
  scalars, specs, operands = call.operands(wide, rows, _alone)
  results = pl.pallas_call(
    functools.partial(
      _forward_kernel,
      num_scalars=len(scalars),
      update=update_TD is not None,
      gain=gain_D is not None,
      columns=columns,
      eps=eps,
      norm_eps=norm_eps,
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=(call.tiles,),
      in_specs=[
        *(whole(x) for x in vectors),
        call.stats_spec(_alone, heads),
        *specs,
      ],
      out_specs=[call.wide_spec(_alone) for _ in written],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((call.tokens, call.width), x.dtype) for x in written
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",),
      vmem_limit_bytes=call.vmem_limit(),
    ),
    cost_estimate=call.cost(flops=14),
    interpret=interpret,
    name="depth_merge_forward",
    metadata=_rows_read(operands, len(scalars) + len(vectors) + 1),
  )(*scalars, *vectors, call.stats(lse_T, heads), *operands)
  results = [x.reshape(out_TD.shape) for x in results]
  return (None if update_TD is None else results[0]), results[-1]


def backward(
  out_TD,
  lse_T,
  query_D,
  total_TD,
  gain_D,
  dtotal_TD,
  dmixed_TD,
  rows=(None, None),
  sinks=None,
  *,
  eps,
  norm_eps,
  heads=1,
  rank=None,
  interpret=False,
):
  """Returns the gradients of out, lse, query, total and gain.

  With sinks (`api.Sinks`), those of out and total are in them: the array of the
  row, and both parts of the sum, all updated in place. If tiles do not fill the
  tokens, that takes a pass of its own: no interpreter has partial tiles of
  arrays that are updated in place, so a kernel could not be tested.
  """
  wide = [out_TD, total_TD, dmixed_TD]
  written = [out_TD, total_TD]
  if sinks is not None:
    dtotals = [sinks.high, sinks.low]
    written.append(total_TD)
  else:
    dtotals = [] if dtotal_TD is None else [dtotal_TD]
  wide += dtotals
  call = Call([*wide, *written])
  if sinks is not None and call.tokens % call.tile:
    alone = functools.partial(
      backward, eps=eps, norm_eps=norm_eps, heads=heads, rank=rank,
      interpret=interpret,
    )  # fmt: skip
    arrays = out_TD, lse_T, query_D, total_TD, gain_D, dtotal_TD, dmixed_TD
    return xla.collecting(alone)(*arrays, rows, sinks)
  parts = max(p for p in range(1, 9) if call.tiles % p == 0)
  steps = call.tiles // parts

  def at(p, s, *_):
    return p * steps + s

  columns = Columns(call.width, heads, rank)
  vectors = columns.vectors(query_D, gain_D)
  sums = (parts, len(vectors), SUBLANES, call.width)
  scalars, specs, operands = call.operands(wide, rows, at)
  first = len(scalars) + len(vectors) + 1
  out_specs = [call.wide_spec(at) for _ in written]
  shapes: list[tuple[int, ...]] = [(call.tokens, call.width) for _ in written]
  metadata, aliases = _rows_read(operands, first), {}
  if sinks is not None:
    stack, index = sinks.out
    # One more number, so one more operand in front of the others.
    numbers = [*scalars, index[None]]
    first += not scalars
    scalars = [jnp.concatenate(numbers)]
    out_specs[0] = call.row_spec(at, len(scalars[0]) - 1)
    shapes[0] = (len(stack), call.tokens, call.width)
    metadata = _rows_read(operands, first) or {}
    operands.append(stack.reshape(shapes[0]))
    specs.append(pl.BlockSpec(memory_space=pl.ANY))
    last = first + len(operands) - 1
    metadata |= {"unread_operands": str(last), "row_of_results": "0"}
    aliases = {last: 0, last - 2: 1, last - 1: 2}
  *dwide, dlse, dvectors = pl.pallas_call(
    functools.partial(
      _backward_kernel,
      num_scalars=len(scalars),
      num_tokens=call.tokens,
      num_dtotals=len(dtotals),
      gain=gain_D is not None,
      columns=columns,
      eps=eps,
      norm_eps=norm_eps,
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=(parts, steps),
      in_specs=[
        *(whole(x) for x in vectors),
        call.stats_spec(at, heads),
        *specs,
      ],
      out_specs=[
        *out_specs,
        call.stats_spec(at, heads),
        pl.BlockSpec((1, *sums[1:]), lambda p, *_: (p, 0, 0, 0)),
      ],
    ),
    out_shape=[
      *(
        jax.ShapeDtypeStruct(shape, x.dtype)
        for shape, x in zip(shapes, written, strict=True)
      ),
      jax.ShapeDtypeStruct((call.tiles, heads, call.tile), jnp.float32),
      jax.ShapeDtypeStruct(sums, jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"),
      vmem_limit_bytes=call.vmem_limit(),
    ),
    cost_estimate=call.cost(flops=34),
    input_output_aliases=aliases,
    interpret=interpret,
    name="depth_merge_backward",
    metadata=metadata,
  )(*scalars, *vectors, call.stats(lse_T, heads), *operands)
  dvectors = dvectors.sum(axis=(0, 2))
  dout, *dtotal = (x.reshape(*x.shape[:-2], *out_TD.shape) for x in dwide)
  return (
    dout,
    call.unpacked(dlse, lse_T.shape, heads),
    dvectors[0] if rank is None else dvectors[0, -rank:],
    dtotal[0] if sinks is None else tuple(dtotal),
    None if gain_D is None else dvectors[1],
  )


def _rows_read(operands, first):
  """Tells who counts bytes of which operands a kernel reads one row."""
  of_rows = [first + i for i, x in enumerate(operands) if x.ndim == 3]
  return {"row_of_operands": " ".join(map(str, of_rows))} if of_rows else None


def _alone(t, *_):
  """The only axis of a grid."""
  return t


def choose_tile(num_tokens, bytes_per_token):
  """Tokens per grid step: up to 128, as long as two buffers stay small."""
  tile, most = _LANES, _BUFFER_SHARE * dispatch.tpu_vmem_bytes()
  while tile > ROWS and (
    2 * tile * bytes_per_token > most or tile // 2 >= num_tokens
  ):
    tile //= 2
  return tile


class Call:
  """Tiles and layouts shared by all kernels that visit each row once."""

  def __init__(self, slabs):
    shape = slabs[0].shape
    self.width = shape[-1]
    self.tokens = 1
    for axis in shape[:-1]:
      self.tokens *= axis
    self.bytes_per_token = self.width * sum(x.dtype.itemsize for x in slabs)
    self.tile = choose_tile(self.tokens, self.bytes_per_token)
    self.tiles = pl.cdiv(self.tokens, self.tile)

  def vmem_limit(self):
    """What a kernel reserves of VMEM."""
    return dispatch.tpu_vmem_limit(self.tile * self.bytes_per_token)

  def flat(self, x):
    return x.reshape(self.tokens, self.width)

  def stats(self, x_T, heads):
    """[*T] or [*T, H] to [tiles, H, tile]."""
    missing = self.tiles * self.tile - self.tokens
    if heads == 1:
      x = jnp.pad(jnp.ravel(x_T), (0, missing))
      return x.reshape(self.tiles, 1, self.tile)
    x = jnp.moveaxis(x_T, -1, 0).reshape(heads, self.tokens)
    x = jnp.pad(x, ((0, 0), (0, missing)))
    return jnp.moveaxis(x.reshape(heads, self.tiles, self.tile), 0, 1)

  def unpacked(self, x, shape, heads):
    """The inverse of `stats`, of an array of this shape."""
    if heads == 1:
      return x.reshape(-1)[: self.tokens].reshape(shape)
    x = jnp.moveaxis(x, 1, 0).reshape(heads, -1)[:, : self.tokens]
    return jnp.moveaxis(x.reshape(heads, *shape[:-1]), 0, -1)

  def wide_spec(self, at):
    return pl.BlockSpec((self.tile, self.width), lambda *i: (at(*i), 0))

  def operands(self, arrays, rows, at):
    """(array of numbers or nothing, block specs, operands).

    Args:
      arrays: [*T, D].
      rows: for the first ones, of what array they are which row, or None. The
        row is read instead. Its index is one of the numbers.
      at: maps grid indices to the tile.
    """
    numbers, specs, operands = [], [], []
    for x, row in itertools.zip_longest(arrays, rows):
      # Of other shapes, flat rows would be a copy of all of them.
      if row is None or x.ndim > 2 and x.shape[-2] % ROWS:
        specs.append(self.wide_spec(at))
        operands.append(self.flat(x))
      else:
        stack, index = row
        specs.append(self.row_spec(at, len(numbers)))
        operands.append(stack.reshape(-1, self.tokens, self.width))
        numbers.append(index)
    return [jnp.stack(numbers)] if numbers else [], specs, operands

  def row_spec(self, at, number):
    return pl.BlockSpec(
      (None, self.tile, self.width), lambda *i: (i[-1][number], at(*i), 0)
    )

  def stats_spec(self, at, heads):
    return pl.BlockSpec((1, heads, self.tile), lambda *i: (at(*i), 0, 0))

  def cost(self, flops):
    return pl.CostEstimate(
      flops=flops * self.tokens * self.width,
      bytes_accessed=self.tokens * (self.bytes_per_token + 4),
      transcendentals=4 * self.tokens,
    )


def _forward_kernel(*refs, num_scalars, update, gain, columns, eps, norm_eps):
  query_ref, *refs = refs[num_scalars:]
  gain_ref, refs = (refs[0], refs[1:]) if gain else (None, refs)
  lse_ref, out_ref, partial_ref, *refs = refs
  update_ref, refs = (refs[0], refs[1:]) if update else (None, refs)
  mixed_ref = refs[-1]
  lse = _to_column(lse_ref)
  for start in range(0, out_ref.shape[0], ROWS):
    rows = slice(start, start + ROWS)
    total = load_rows(partial_ref, rows)
    if update:
      total += load_rows(update_ref, rows)
      refs[0][rows, :] = total.astype(refs[0].dtype)
    score, _ = _score(total, query_ref, columns, eps)
    keep, take = xla.two_weights(lse[rows], score)
    keep, take = columns.spread(keep), columns.spread(take)
    mixed = keep * load_rows(out_ref, rows) + take * total
    if gain_ref is not None:
      mixed *= jax.lax.rsqrt(mean(mixed * mixed) + norm_eps)
      mixed *= gain_ref[...]
    mixed_ref[rows, :] = mixed.astype(mixed_ref.dtype)


def _backward_kernel(
  *refs, num_scalars, num_tokens, num_dtotals, gain, columns, eps, norm_eps
):
  query_ref, *refs = refs[num_scalars:]
  gain_ref, refs = (refs[0], refs[1:]) if gain else (None, refs)
  lse_ref, out_ref, total_ref, dmixed_ref, *refs = refs
  dtotal_in_refs, refs = refs[:num_dtotals], refs[num_dtotals:]
  # In two parts, it is a sink; then so is an array that only has an address.
  dlow_ref = None
  if num_dtotals == 2:
    dlow_ref, refs = refs[3], refs[1:3] + refs[4:]
  dout_ref, dtotal_ref, dlse_ref, sums_ref = refs
  tile, width = out_ref.shape
  step = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)

  @pl.when(pl.program_id(1) == 0)
  def _():
    sums_ref[...] = jnp.zeros_like(sums_ref)

  lse = _to_column(lse_ref)
  dscores = []
  for start in range(0, tile, ROWS):
    rows = slice(start, start + ROWS)
    kept = kept_rows(num_tokens, tile, step * tile + start)
    load = functools.partial(load_rows, rows=rows, kept=kept)
    out, total, dmixed = load(out_ref), load(total_ref), load(dmixed_ref)
    score, inverse = _score(total, query_ref, columns, eps)
    keep, take = xla.two_weights(lse[rows], score)
    apart, slope, shift = total - out, keep * take, 0.0
    keep, take = columns.spread(keep), columns.spread(take)
    if gain_ref is not None:
      mixed = keep * out + take * total
      norm = jax.lax.rsqrt(mean(mixed * mixed) + norm_eps)
      mixed *= norm
      sums_ref[0, 1] += fold(dmixed * mixed)
      dmixed *= gain_ref[...]
      along = mean(dmixed * mixed)
      dmixed = norm * (dmixed - along * mixed)
      # Orthogonal to the mixture is the gradient of all heads together.
      if columns.heads == 1:
        alone = xla.partial_alone(keep, take, norm, inverse)
        apart = total - jnp.where(alone, 0.0, 1.0) * out
        slope = jnp.where(alone, take, slope)
        shift = jnp.where(alone, norm_eps * width * norm * norm * along, 0.0)
    dscore = slope * (columns.sums(dmixed * apart) - shift)
    pull = dscore * inverse
    bend = pull * score * inverse * (1.0 / columns.key_width)
    if columns.heads > 1:
      bend = jnp.sum(bend, axis=1, keepdims=True)
    pull = columns.spread(pull)
    sums_ref[0, 0] += fold(pull * total)
    dout_ref[rows, :] = (keep * dmixed).astype(dout_ref.dtype)
    bent = columns.only_keys(total)
    dsum = take * dmixed - bend * bent + pull * query_ref[...]
    for ref in dtotal_in_refs:
      dsum += load(ref)
    high = dsum.astype(dtotal_ref.dtype)
    dtotal_ref[rows, :] = high
    if dlow_ref is not None:
      low = dsum - high.astype(jnp.float32)
      dlow_ref[rows, :] = low.astype(dlow_ref.dtype)
    dscores.append(dscore)
  dscore = jnp.concatenate(dscores, axis=0)
  if columns.heads == 1:
    dscore = jnp.broadcast_to(dscore, (tile, _LANES))
  dlse_ref[0] = -jnp.transpose(dscore)[: columns.heads]


def kept_rows(num_tokens, tile, base):
  """Which of the rows from `base` on are tokens; None if all are."""
  if num_tokens % tile == 0:
    return None
  row = jax.lax.broadcasted_iota(jnp.int32, (ROWS, 1), 0)
  return row < num_tokens - base


def load_rows(ref, rows, kept=None):
  x = ref[rows, :].astype(jnp.float32)
  return x if kept is None else jnp.where(kept, x, 0.0)


def _score(total, query_ref, columns, eps):
  """Scores [rows, H], and the inverse norm of keys [rows, 1]."""
  key = columns.only_keys(total)
  square = jnp.sum(key * key, axis=1, keepdims=True)
  inverse = jax.lax.rsqrt(square * (1.0 / columns.key_width) + eps)
  return columns.sums(total * query_ref[...]) * inverse, inverse


def mean(x):
  return jnp.sum(x, axis=1, keepdims=True) * (1.0 / x.shape[1])


def fold(x):
  """Sums rows down to one tile of sublanes, by vector additions only."""
  return sum(x[i : i + SUBLANES] for i in range(0, x.shape[0], SUBLANES))


def _to_column(ref):
  """[1, H, tokens] along lanes to [tokens, H]."""
  if ref.shape[1] > 1:
    return jnp.transpose(ref[0])
  row = jnp.broadcast_to(ref[0], (SUBLANES, ref.shape[-1]))
  return jnp.transpose(row)[:, :1]


def whole(array):
  return pl.BlockSpec(array.shape, lambda *i: (0,) * array.ndim)
