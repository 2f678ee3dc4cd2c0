# SPDX-License-Identifier: Apache-2.0
"""Phase 2 on TPU: score, merge and pre-norm in one pass over memory.

Plain vector operations on 16 rows at a time, in float32; every array is read
and written once. Per-token statistics are stored along lanes, [tiles, 1,
tokens], because a [tokens, 1] array would be padded to 128 lanes in memory.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels import dispatch
from attnres_kernels.depth_merge import plain
from attnres_kernels.depth_merge.pallas_tpu_columns import Columns

ROWS = 16
_BUFFER_SHARE = 3 / 7  # Of VMEM.
_LANES = 128
SUBLANES = 8


def why_not(
  function: str, *args: Any, eps: float, norm_eps: float, heads: int = 1,
  rank: int | None = None,
) -> str | None:  # fmt: skip
  """The reason why these arguments cannot run, or None."""
  del function, eps, norm_eps, rank
  if heads > _LANES:
    return f"at most {_LANES} heads, got {heads}"
  dtypes = {str(x.dtype) for x in jax.tree.leaves(args) if x.ndim}
  if not dtypes <= {"bfloat16", "float32"}:
    return f"arrays must be bfloat16 or float32, got {sorted(dtypes)}"
  return None


def forward(
  out_TD: jax.Array, lse_T: jax.Array, query_D: jax.Array,
  partial_TD: jax.Array, gain_D: jax.Array | None, *, eps: float,
  norm_eps: float, heads: int = 1, rank: int | None = None,
  interpret: Any = False,
) -> jax.Array:  # fmt: skip
  """Returns the merged mixture, normalised if there is a gain."""
  call = Call([out_TD, partial_TD, out_TD])
  columns = Columns(call.width, heads, rank)
  vectors = columns.vectors(query_D, gain_D)
  mixed_TD = pl.pallas_call(
    functools.partial(
      _forward_kernel,
      gain=gain_D is not None,
      columns=columns,
      eps=eps,
      norm_eps=norm_eps,
    ),
    grid=(call.tiles,),
    in_specs=[
      *(constant_spec(x) for x in vectors),
      call.stats_spec(_step, heads),
      *[call.wide_spec(_step)] * 2,
    ],
    out_specs=call.wide_spec(_step),
    out_shape=jax.ShapeDtypeStruct((call.tokens, call.width), out_TD.dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",),
      vmem_limit_bytes=call.vmem_limit(),
    ),
    cost_estimate=call.cost(flops=14),
    interpret=interpret,
    name="depth_merge_forward",
  )(*vectors, call.stats(lse_T, heads), *map(call.flat, (out_TD, partial_TD)))
  return mixed_TD.reshape(out_TD.shape)


def backward(
  out_TD: jax.Array, lse_T: jax.Array, query_D: jax.Array,
  partial_TD: jax.Array, gain_D: jax.Array | None, dmixed_TD: jax.Array, *,
  eps: float, norm_eps: float, heads: int = 1, rank: int | None = None,
  interpret: Any = False,
) -> tuple[jax.Array | None, ...]:  # fmt: skip
  """Returns the gradients of out, lse, query, partial and gain."""
  wide, written = [out_TD, partial_TD, dmixed_TD], [out_TD, partial_TD]
  call = Call([*wide, *written])
  parts = max(p for p in range(1, 9) if call.tiles % p == 0)
  steps = call.tiles // parts

  def at(p, s):
    return p * steps + s

  columns = Columns(call.width, heads, rank)
  vectors = columns.vectors(query_D, gain_D)
  sums = (parts, len(vectors), SUBLANES, call.width)
  dout, dpartial, dlse, dvectors = pl.pallas_call(
    functools.partial(
      _backward_kernel,
      num_tokens=call.tokens,
      gain=gain_D is not None,
      columns=columns,
      eps=eps,
      norm_eps=norm_eps,
    ),
    grid=(parts, steps),
    in_specs=[
      *(constant_spec(x) for x in vectors),
      call.stats_spec(at, heads),
      *[call.wide_spec(at)] * len(wide),
    ],
    out_specs=[
      *[call.wide_spec(at)] * len(written),
      call.stats_spec(at, heads),
      pl.BlockSpec((1, *sums[1:]), lambda p, *_: (p, 0, 0, 0)),
    ],
    out_shape=[
      *(
        jax.ShapeDtypeStruct((call.tokens, call.width), x.dtype)
        for x in written
      ),
      jax.ShapeDtypeStruct((call.tiles, heads, call.tile), jnp.float32),
      jax.ShapeDtypeStruct(sums, jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"),
      vmem_limit_bytes=call.vmem_limit(),
    ),
    cost_estimate=call.cost(flops=34),
    interpret=interpret,
    name="depth_merge_backward",
  )(*vectors, call.stats(lse_T, heads), *map(call.flat, wide))
  dvectors = dvectors.sum(axis=(0, 2))
  return (
    dout.reshape(out_TD.shape),
    call.unpacked(dlse, lse_T.shape, heads),
    dvectors[0] if rank is None else dvectors[0, -rank:],
    dpartial.reshape(out_TD.shape),
    None if gain_D is None else dvectors[1],
  )


def _step(t: Any) -> Any:
  """The only axis of a grid."""
  return t


def choose_tile(num_tokens: int, bytes_per_token: int) -> int:
  """Tokens per grid step: up to 128, as long as two buffers stay small."""
  tile, most = _LANES, _BUFFER_SHARE * dispatch.tpu_vmem_bytes()
  while tile > ROWS and (
    2 * tile * bytes_per_token > most or tile // 2 >= num_tokens
  ):
    tile //= 2
  return tile


class Call:
  """Tiles and layouts shared by all kernels that visit each row once."""

  def __init__(self, slabs: list[jax.Array]):
    shape = slabs[0].shape
    self.width = shape[-1]
    self.tokens = 1
    for axis in shape[:-1]:
      self.tokens *= axis
    self.bytes_per_token = self.width * sum(x.dtype.itemsize for x in slabs)
    self.tile = choose_tile(self.tokens, self.bytes_per_token)
    self.tiles = pl.cdiv(self.tokens, self.tile)

  def vmem_limit(self) -> int:
    """What a kernel reserves of VMEM."""
    return dispatch.tpu_vmem_limit(self.tile * self.bytes_per_token)

  def flat(self, x: jax.Array) -> jax.Array:
    return x.reshape(self.tokens, self.width)

  def stats(self, x_T: jax.Array, heads: int) -> jax.Array:
    """[*T] or [*T, H] to [tiles, H, tile]."""
    missing = self.tiles * self.tile - self.tokens
    if heads == 1:
      x = jnp.pad(jnp.ravel(x_T), (0, missing))
      return x.reshape(self.tiles, 1, self.tile)
    x = jnp.moveaxis(x_T, -1, 0).reshape(heads, self.tokens)
    x = jnp.pad(x, ((0, 0), (0, missing)))
    return jnp.moveaxis(x.reshape(heads, self.tiles, self.tile), 0, 1)

  def unpacked(
    self, x: jax.Array, shape: tuple[int, ...], heads: int
  ) -> jax.Array:
    """The inverse of `stats`, of an array of this shape."""
    if heads == 1:
      return x.reshape(-1)[: self.tokens].reshape(shape)
    x = jnp.moveaxis(x, 1, 0).reshape(heads, -1)[:, : self.tokens]
    return jnp.moveaxis(x.reshape(heads, *shape[:-1]), 0, -1)

  def wide_spec(self, at: Callable[..., Any]) -> pl.BlockSpec:
    return pl.BlockSpec((self.tile, self.width), lambda *i: (at(*i), 0))

  def stats_spec(self, at: Callable[..., Any], heads: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, heads, self.tile), lambda *i: (at(*i), 0, 0))

  def cost(self, flops: int) -> pl.CostEstimate:
    return pl.CostEstimate(
      flops=flops * self.tokens * self.width,
      bytes_accessed=self.tokens * (self.bytes_per_token + 4),
      transcendentals=4 * self.tokens,
    )


def _forward_kernel(
  *refs: Any, gain: bool, columns: Columns, eps: float, norm_eps: float
) -> None:
  """Query and gain [1, D], lse [1, H, tile], out and partial [tile, D].

  Then the result [tile, D].
  """
  query_ref, *others = refs
  gain_ref = others.pop(0) if gain else None
  lse_ref, out_ref, partial_ref, mixed_ref = others
  lse = _to_column(lse_ref)
  for start in range(0, out_ref.shape[0], ROWS):
    rows = slice(start, start + ROWS)
    partial = load_rows(partial_ref, rows)
    score, _ = _score(partial, query_ref, columns, eps)
    out_weight, partial_weight = map(
      columns.spread, plain.two_weights(lse[rows], score)
    )
    mixed = out_weight * load_rows(out_ref, rows) + partial_weight * partial
    if gain_ref is not None:
      mixed *= jax.lax.rsqrt(mean(mixed * mixed) + norm_eps)
      mixed *= gain_ref[...]
    mixed_ref[rows, :] = mixed.astype(mixed_ref.dtype)


def _backward_kernel(
  *refs: Any, num_tokens: int, gain: bool, columns: Columns, eps: float,
  norm_eps: float,
) -> None:  # fmt: skip
  """Query and gain [1, D], lse [1, H, tile], then arrays [tile, D].

  These are out, the partial sum and the gradient of the mixture. Then the
  results: gradients of out and of the partial sum, of lse, and of the vectors,
  summed over steps [1, 2, 8, D].
  """
  query_ref, *others = refs
  gain_ref = others.pop(0) if gain else None
  lse_ref, out_ref, partial_ref, dmixed_ref, *results = others
  dout_ref, dpartial_ref, dlse_ref, sums_ref = results
  tile = out_ref.shape[0]
  step = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)

  @pl.when(pl.program_id(1) == 0)
  def _():
    sums_ref[...] = jnp.zeros_like(sums_ref)

  lse = _to_column(lse_ref)
  dscores = []
  for start in range(0, tile, ROWS):
    rows = slice(start, start + ROWS)
    valid = valid_rows(num_tokens, tile, step * tile + start)
    load = functools.partial(load_rows, rows=rows, valid=valid)
    out, partial, dmixed = load(out_ref), load(partial_ref), load(dmixed_ref)
    score, inverse = _score(partial, query_ref, columns, eps)
    out_weight, partial_weight = plain.two_weights(lse[rows], score)
    slope = out_weight * partial_weight
    out_weight, partial_weight = (
      columns.spread(out_weight),
      columns.spread(partial_weight),
    )
    if gain_ref is not None:
      mixed = out_weight * out + partial_weight * partial
      norm = jax.lax.rsqrt(mean(mixed * mixed) + norm_eps)
      mixed *= norm
      sums_ref[0, 1] += fold(dmixed * mixed)
      dmixed *= gain_ref[...]
      dmixed = norm * (dmixed - mean(dmixed * mixed) * mixed)
    dscore = slope * columns.sums(dmixed * (partial - out))
    pull = dscore * inverse
    bend = pull * score * inverse * (1.0 / columns.key_width)
    if columns.heads > 1:
      bend = jnp.sum(bend, axis=1, keepdims=True)
    pull = columns.spread(pull)
    sums_ref[0, 0] += fold(pull * partial)
    dout_ref[rows, :] = (out_weight * dmixed).astype(dout_ref.dtype)
    dpartial = partial_weight * dmixed - bend * columns.only_keys(partial)
    dpartial += pull * query_ref[...]
    dpartial_ref[rows, :] = dpartial.astype(dpartial_ref.dtype)
    dscores.append(dscore)
  dscore = jnp.concatenate(dscores, axis=0)
  if columns.heads == 1:
    dscore = jnp.broadcast_to(dscore, (tile, _LANES))
  dlse_ref[0] = -jnp.transpose(dscore)[: columns.heads]


def valid_rows(num_tokens: int, tile: int, base: Any) -> jax.Array | None:
  """Which of the rows from `base` on are tokens; None if all are."""
  if num_tokens % tile == 0:
    return None
  row = jax.lax.broadcasted_iota(jnp.int32, (ROWS, 1), 0)
  return row < num_tokens - base


def load_rows(
  ref: Any, rows: slice, valid: jax.Array | None = None
) -> jax.Array:
  x = ref[rows, :].astype(jnp.float32)
  return x if valid is None else jnp.where(valid, x, 0.0)


def _score(
  total: jax.Array, query_ref: Any, columns: Columns, eps: float
) -> tuple[jax.Array, jax.Array]:
  """Scores [rows, H], and the inverse norm of keys [rows, 1]."""
  key = columns.only_keys(total)
  square = jnp.sum(key * key, axis=1, keepdims=True)
  inverse = jax.lax.rsqrt(square * (1.0 / columns.key_width) + eps)
  return columns.sums(total * query_ref[...]) * inverse, inverse


def mean(x: jax.Array) -> jax.Array:
  return jnp.sum(x, axis=1, keepdims=True) * (1.0 / x.shape[1])


def fold(x: jax.Array) -> jax.Array:
  """Sums rows down to one tile of sublanes, by vector additions only."""
  parts = (x[i : i + SUBLANES] for i in range(0, x.shape[0], SUBLANES))
  return functools.reduce(jnp.add, parts)


def _to_column(ref: Any) -> jax.Array:
  """[1, H, tokens] along lanes to [tokens, H]."""
  if ref.shape[1] > 1:
    return jnp.transpose(ref[0])
  row = jnp.broadcast_to(ref[0], (SUBLANES, ref.shape[-1]))
  return jnp.transpose(row)[:, :1]


def constant_spec(array: jax.Array) -> pl.BlockSpec:
  return pl.BlockSpec(array.shape, lambda *i: (0,) * array.ndim)
