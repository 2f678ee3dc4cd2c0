# SPDX-License-Identifier: Apache-2.0
"""Phase 2 on TPU: score, merge and pre-norm in one pass over memory.

Plain vector operations on 16 rows at a time, in float32; every array is read
and written once. The sums over the slices of heads are columns of one array
[rows, H], so that weights are computed for all heads at once.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels import pallas_tpu_rows as tpu_rows
from attnres_kernels.depth_merge import plain

why_slow = tpu_rows.why_slow


def why_not(
  function: str, *args: Any, heads: int = 1, **options: Any
) -> str | None:
  """The reason why these arguments cannot run, or None."""
  if any(isinstance(x, tuple) for x in args):
    return "one partial sum at a time"
  if heads > tpu_rows.LANES:
    return f"at most {tpu_rows.LANES} heads, got {heads}"
  dtypes = {str(x.dtype) for x in jax.tree.leaves(args) if x.ndim}
  if not dtypes <= {"bfloat16", "float32"}:
    return f"arrays must be bfloat16 or float32, got {sorted(dtypes)}"
  return None


class _Options(NamedTuple):
  """What a kernel does: whether it has a gain, heads, columns of keys, eps."""

  gain: bool
  heads: int
  key_width: int
  eps: float
  norm_eps: float


def _operands(
  out_TD: jax.Array, query_D: jax.Array, gain_D: jax.Array | None
) -> list[jax.Array]:
  """Query and gain [1, D]; the query is zero in front of the key."""
  query_D = jnp.pad(query_D, (out_TD.shape[-1] - query_D.size, 0))
  return [x[None] for x in (query_D, gain_D) if x is not None]


def forward(
  out_TD: jax.Array, lse_T: jax.Array, query_D: jax.Array,
  partial_TD: jax.Array, gain_D: jax.Array | None, *, eps: float,
  norm_eps: float, heads: int = 1, rank: int | None = None,
  interpret: Any = False,
) -> jax.Array:  # fmt: skip
  """Returns the merged mixture, normalised if there is a gain."""
  call = tpu_rows.Call([out_TD, partial_TD, out_TD])
  options = _Options(
    gain_D is not None, heads, rank or call.width, eps, norm_eps
  )
  operands = _operands(out_TD, query_D, gain_D)
  mixed_TD = pl.pallas_call(
    functools.partial(_forward_kernel, options=options),
    grid=(call.tiles,),
    in_specs=[
      *(tpu_rows.constant_spec(x.shape) for x in operands),
      call.stats_spec(heads),
      *[call.wide_spec()] * 2,
    ],
    out_specs=call.wide_spec(),
    out_shape=call.like(out_TD),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",), vmem_limit_bytes=call.vmem_limit()
    ),
    cost_estimate=call.cost(14, 4),
    interpret=interpret,
    name="depth_merge_forward",
  )(
    *operands, call.stats(lse_T[None], heads),
    *map(call.flat, (out_TD, partial_TD)),
  )  # fmt: skip
  return mixed_TD.reshape(out_TD.shape)


def backward(
  out_TD: jax.Array, lse_T: jax.Array, query_D: jax.Array,
  partial_TD: jax.Array, gain_D: jax.Array | None, dmixed_TD: jax.Array, *,
  eps: float, norm_eps: float, heads: int = 1, rank: int | None = None,
  interpret: Any = False,
) -> tuple[jax.Array | None, ...]:  # fmt: skip
  """Returns the gradients of out, lse, query, partial and gain."""
  wide, written = [out_TD, partial_TD, dmixed_TD], [out_TD, partial_TD]
  call = tpu_rows.Call([*wide, *written])
  options = _Options(
    gain_D is not None, heads, rank or call.width, eps, norm_eps
  )
  operands = _operands(out_TD, query_D, gain_D)
  # Rows in float32 that do not fit in registers, beside all that are narrow.
  values = 4 * tpu_rows.ROWS * call.width * 4
  sums = call.parts, 1 + options.gain, tpu_rows.SUBLANES, call.width
  dout, dpartial, dlse, dvectors = pl.pallas_call(
    functools.partial(
      _backward_kernel, num_tokens=call.tokens, options=options
    ),
    grid=(call.parts, call.tiles // call.parts),
    in_specs=[
      *(tpu_rows.constant_spec(x.shape) for x in operands),
      call.stats_spec(heads),
      *[call.wide_spec()] * len(wide),
    ],
    out_specs=[
      *[call.wide_spec()] * len(written),
      call.stats_spec(heads),
      tpu_rows.sums_spec(sums),
    ],
    out_shape=[
      *map(call.like, written),
      call.stats_out(heads),
      jax.ShapeDtypeStruct(sums, jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"),
      vmem_limit_bytes=call.vmem_limit(values),
    ),
    cost_estimate=call.cost(34, 4),
    interpret=interpret,
    name="depth_merge_backward",
  )(*operands, call.stats(lse_T[None], heads), *map(call.flat, wide))
  dvectors = dvectors.sum(axis=(0, 2))
  return (
    dout.reshape(out_TD.shape),
    call.from_stats(dlse, out_TD.shape[:-1], heads)[0],
    dvectors[0, -query_D.size :],
    dpartial.reshape(out_TD.shape),
    dvectors[1] if options.gain else None,
  )


def _forward_kernel(*refs: Any, options: _Options) -> None:
  """Query and gain [1, D], lse [1, H, tile], out and partial [tile, D].

  Then the result [tile, D].
  """
  rows_of = _Rows(list(refs), options)
  out_ref, partial_ref, mixed_ref = rows_of.refs
  for start in range(0, out_ref.shape[0], tpu_rows.ROWS):
    rows = slice(start, start + tpu_rows.ROWS)
    partial = tpu_rows.load_rows(partial_ref, rows)
    score, _ = rows_of.score(partial)
    out_weight, partial_weight = map(
      rows_of.spread, plain.two_weights(rows_of.lse[rows], score)
    )
    mixed = out_weight * tpu_rows.load_rows(out_ref, rows)
    mixed += partial_weight * partial
    if rows_of.gain_ref is not None:
      mixed *= jax.lax.rsqrt(mean(mixed * mixed) + options.norm_eps)
      mixed *= rows_of.gain_ref[...]
    mixed_ref[rows, :] = mixed.astype(mixed_ref.dtype)


def _backward_kernel(*refs: Any, num_tokens: int, options: _Options) -> None:
  """As forward, with the gradient of the mixture [tile, D] behind partial.

  Then the results: gradients of out and of the partial sum, of lse, and of
  query and gain, summed over steps [1, 2, 8, D].
  """
  rows_of = _Rows(list(refs), options)
  out_ref, partial_ref, dmixed_ref, *results = rows_of.refs
  dout_ref, dpartial_ref, dlse_ref, sums_ref = results
  tile = out_ref.shape[0]
  step = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)

  @pl.when(pl.program_id(1) == 0)
  def _():
    sums_ref[...] = jnp.zeros_like(sums_ref)

  dscores = []
  for start in range(0, tile, tpu_rows.ROWS):
    rows = slice(start, start + tpu_rows.ROWS)
    valid = tpu_rows.valid_rows(num_tokens, tile, step * tile + start)
    load = functools.partial(tpu_rows.load_rows, rows=rows, valid=valid)
    out, partial, dmixed = load(out_ref), load(partial_ref), load(dmixed_ref)
    score, inverse = (
      tpu_rows.zero_unless(valid, x) for x in rows_of.score(partial)
    )
    weights = plain.two_weights(rows_of.lse[rows], score)
    slope = weights[0] * weights[1]
    out_weight, partial_weight = map(rows_of.spread, weights)
    if rows_of.gain_ref is not None:
      mixed = out_weight * out + partial_weight * partial
      norm = jax.lax.rsqrt(mean(mixed * mixed) + options.norm_eps)
      norm = tpu_rows.zero_unless(valid, norm)
      mixed *= norm
      sums_ref[0, 1] += fold(dmixed * mixed)
      dmixed *= rows_of.gain_ref[...]
      dmixed = norm * (dmixed - mean(dmixed * mixed) * mixed)
    dscore = slope * rows_of.sums(dmixed * (partial - out))
    pull = dscore * inverse
    bend = pull * score * inverse * (1.0 / options.key_width)
    bend = jnp.sum(bend, axis=1, keepdims=True)
    pull = rows_of.spread(pull)
    sums_ref[0, 0] += fold(pull * partial)
    dout_ref[rows, :] = (out_weight * dmixed).astype(dout_ref.dtype)
    dpartial = partial_weight * dmixed - bend * rows_of.keys(partial)
    dpartial += pull * rows_of.query_ref[...]
    dpartial_ref[rows, :] = dpartial.astype(dpartial_ref.dtype)
    dscores.append(dscore)
  dscore = jnp.concatenate(dscores, axis=0)
  if options.heads == 1:
    dscore = jnp.broadcast_to(dscore, (tile, tpu_rows.LANES))
  dlse_ref[0] = -jnp.transpose(dscore)[: options.heads]


class _Rows:
  """The arguments that all rows share, and what is computed with them."""

  def __init__(self, refs: list[Any], options: _Options):
    self._options = options
    self.query_ref = refs.pop(0)
    self.gain_ref = refs.pop(0) if options.gain else None
    self.lse = _to_column(refs.pop(0))
    self.refs = refs

  def keys(self, x: jax.Array) -> jax.Array:
    """Zero in front of the key."""
    front = x.shape[1] - self._options.key_width
    if not front:
      return x
    return jnp.where(tpu_rows.iota(x.shape, 1) >= front, x, 0.0)

  def score(self, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scores [rows, H], and the inverse norm of keys [rows, 1]."""
    key = self.keys(total)
    square = jnp.sum(key * key, axis=1, keepdims=True)
    square *= 1.0 / self._options.key_width
    inverse = jax.lax.rsqrt(square + self._options.eps)
    return self.sums(total * self.query_ref[...]) * inverse, inverse

  def sums(self, x: jax.Array) -> jax.Array:
    """Of each slice: [rows, D] to [rows, H]."""
    heads, (rows, width) = self._options.heads, x.shape
    result = jnp.zeros((rows, heads), jnp.float32)
    for head in range(heads):
      first, last = head * width // heads, (head + 1) * width // heads
      # Whole registers, of which a mask leaves the slice.
      start = first - first % tpu_rows.LANES
      part = x[:, start : min(last + -last % tpu_rows.LANES, width)]
      if part.shape[1] != last - first:
        column = tpu_rows.iota(part.shape, 1) + start
        part = jnp.where((column >= first) & (column < last), part, 0.0)
      total = jnp.sum(part, axis=1, keepdims=True)
      place = tpu_rows.iota(result.shape, 1)
      result = total if heads == 1 else jnp.where(place == head, total, result)
    return result

  def spread(self, x: jax.Array) -> jax.Array:
    """[rows, H] to the columns of each slice [rows, D]."""
    heads, width = self._options.heads, self.query_ref.shape[1]
    parts = []
    for start in range(0, width if heads > 1 else 0, tpu_rows.LANES):
      stop, size = min(start + tpu_rows.LANES, width), width // heads
      column = tpu_rows.iota((len(x), stop - start), 1) + start
      part = jnp.zeros(column.shape, x.dtype)
      for head in range(start // size, (stop - 1) // size + 1):
        part = jnp.where(column >= head * size, x[:, head : head + 1], part)
      parts.append(part)
    return jnp.concatenate(parts, axis=1) if parts else x


def mean(x: jax.Array) -> jax.Array:
  return jnp.sum(x, axis=1, keepdims=True) * (1.0 / x.shape[1])


def fold(x: jax.Array) -> jax.Array:
  """Sums rows down to one tile of sublanes, by vector additions only."""
  size = tpu_rows.SUBLANES
  parts = (x[i : i + size] for i in range(0, x.shape[0], size))
  return functools.reduce(jnp.add, parts)


def _to_column(ref: Any) -> jax.Array:
  """[1, H, tokens] along lanes to [tokens, H]."""
  if ref.shape[1] > 1:
    return jnp.transpose(ref[0])
  row = jnp.broadcast_to(ref[0], (tpu_rows.SUBLANES, ref.shape[-1]))
  return jnp.transpose(row)[:, :1]
