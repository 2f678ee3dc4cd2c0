# SPDX-License-Identifier: Apache-2.0
"""The op on TPU: every array of tokens is read once and written once.

Coefficients have tokens along lanes, 128 of them in a grid step; transposed,
they scale rows of [tokens, D]. The backward pass computes the new streams a
second time rather than reading them.

Gradients of coefficients are products of a token of one array with the same
token of another, on the vector units.
"""

from collections.abc import Iterable, Iterator
import functools
import itertools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels import dispatch
from attnres_kernels import pallas_tpu_rows as tpu_rows

_TILE = 128  # Tokens of a grid step, along the lanes of coefficients.
_PARTS = 2  # Sums over tokens, one for each core of a chip.
_CHUNK = 512  # Columns that are worked on at a time.
_MOST_STREAMS = 8  # Beyond, programs grow too long.
_SPILLED = 5 * 2**20  # For values that do not fit in registers.


def why_not(
  function: str, streams: tuple[jax.Array, ...], y: jax.Array, write: jax.Array,
  mix: jax.Array, weight: jax.Array, *args: Any, eps: float, dtype: Any,
) -> str | None:  # fmt: skip
  """The reason why these arguments cannot run, or None."""
  count, stored = len(streams), streams[0].dtype
  dtypes = {str(stored), str(y.dtype), str(jnp.dtype(dtype))}
  if not dtypes <= {"bfloat16", "float32"}:
    return f"arrays must be bfloat16 or float32, got {sorted(dtypes)}"
  if stored == jnp.bfloat16 and len(dtypes) > 1:
    return "streams in bfloat16 need y and h in bfloat16"
  tokens = math.prod(y.shape[:-1])
  if tokens < _TILE:
    return f"at least {_TILE} tokens, got {tokens}"
  if count > _MOST_STREAMS:
    return f"at most {_MOST_STREAMS} streams, got {count}"
  call = Call(streams, y, weight)
  needed = call.vmem_bytes(function == "backward") + _SPILLED
  if needed > dispatch.tpu_vmem_bytes():
    return (
      f"{count} streams {y.shape} in {stored} need {needed >> 20} MiB of VMEM"
    )
  return None


def forward(
  streams: tuple[jax.Array, ...], y: jax.Array, write_MT: jax.Array,
  mix_MMT: jax.Array, weight_MDC: jax.Array, bias_M: jax.Array,
  scale: jax.Array, *, eps: float, dtype: Any, interpret: Any = False,
) -> tuple[Any, ...]:  # fmt: skip
  """Returns (new streams, the next read, logits, their inverse norm)."""
  call = Call(streams, y, weight_MDC)
  count, tile = call.count, call.tile
  outs = [*streams, jax.ShapeDtypeStruct(y.shape, dtype)]
  *new, h, logits_CT, inverse_1T = pl.pallas_call(
    functools.partial(_forward_kernel, count=count, eps=eps),
    grid=(call.tiles,),
    in_specs=[
      tpu_rows.constant_spec((count, 2)),
      tpu_rows.constant_spec((count, call.columns, call.width)),
      call.row_spec(count * (count + 1)),
      *(call.wide_spec() for _ in range(count + 1)),
    ],
    out_specs=[
      *(call.wide_spec() for _ in outs),
      call.row_spec(call.columns),
      call.row_spec(1),
    ],
    out_shape=[
      *(call.like(x) for x in outs),
      call.row_struct(call.columns),
      call.row_struct(1),
    ],
    scratch_shapes=[pltpu.VMEM((tile, tpu_rows.LANES), jnp.float32)],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",),
      vmem_limit_bytes=dispatch.tpu_vmem_bytes(),
    ),
    cost_estimate=call.estimate(backward=False),
    interpret=interpret,
    name="stream_mix_forward",
  )(
    *call.small(weight_MDC, bias_M, scale),
    call.factors(write_MT, mix_MMT),
    *(call.flat(x) for x in (*streams, y)),
  )
  shape = y.shape[:-1]
  return (
    tuple(x.reshape(y.shape) for x in new),
    h.reshape(y.shape),
    logits_CT[: weight_MDC.shape[2]].reshape(-1, *shape),
    inverse_1T.reshape(shape),
  )


def backward(
  streams: tuple[jax.Array, ...], y: jax.Array, write_MT: jax.Array,
  mix_MMT: jax.Array, weight_MDC: jax.Array, bias_M: jax.Array,
  scale: jax.Array, new: tuple[jax.Array, ...], logits_CT: jax.Array,
  inverse_T: jax.Array, dnew: tuple[jax.Array, ...], dh: Any,
  dlogits_CT: jax.Array, dinverse_T: jax.Array, *, eps: float, dtype: Any,
  interpret: Any = False,
) -> tuple[Any, ...]:  # fmt: skip
  """Returns the gradients of the first seven arguments."""
  # The inverse norm is no result of the public function.
  call = Call(streams, y, weight_MDC)
  count, tile, columns = call.count, call.tile, call.columns
  sums = call.parts, count, columns, call.width
  wide = [*streams, y, *dnew, dh]
  outs = [*streams, y]
  *dstreams, dy, dfactors, dgate, dweight = pl.pallas_call(
    functools.partial(_backward_kernel, count=count, tokens=call.tokens),
    grid=(call.parts, call.tiles // call.parts),
    in_specs=[
      tpu_rows.constant_spec((count, 2)),
      tpu_rows.constant_spec((count, columns, call.width)),
      call.row_spec(count * (count + 1)),
      call.row_spec(columns),
      call.row_spec(1),
      call.row_spec(columns),
      *(call.wide_spec() for _ in wide),
    ],
    out_specs=[
      *(call.wide_spec() for _ in outs),
      call.row_spec(count * (count + 1)),
      call.row_spec(count),
      tpu_rows.sums_spec(sums),
    ],
    out_shape=[
      *(call.like(x) for x in outs),
      call.row_struct(count * (count + 1)),
      call.row_struct(count),
      jax.ShapeDtypeStruct(sums, jnp.float32),
    ],
    scratch_shapes=[
      pltpu.VMEM((count * tile, call.width), dtype) for dtype in call.stacks
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"),
      vmem_limit_bytes=dispatch.tpu_vmem_bytes(),
    ),
    cost_estimate=call.estimate(backward=True),
    interpret=interpret,
    name="stream_mix_backward",
  )(
    *call.small(weight_MDC, bias_M, scale),
    call.factors(write_MT, mix_MMT),
    call.rows(logits_CT),
    inverse_T.reshape(1, -1),
    call.rows(dlogits_CT),
    *(call.flat(x) for x in wide),
  )
  logits_MT = logits_CT[:count]
  dgate_MT = dgate.reshape(logits_MT.shape)
  dfactors = dfactors.reshape(count, count + 1, *y.shape[:-1])
  tokens = tuple(range(1, logits_MT.ndim))
  dweight = jnp.sum(dweight, axis=0)[:, : weight_MDC.shape[2]]
  return (
    tuple(x.reshape(y.shape) for x in dstreams),
    dy.reshape(y.shape),
    dfactors[:, count],
    jnp.swapaxes(dfactors[:, :count], 0, 1),
    jnp.swapaxes(dweight, 1, 2).astype(weight_MDC.dtype),
    jnp.sum(dgate_MT, axis=tokens),
    jnp.sum(dgate_MT * logits_MT),
  )


class Call(tpu_rows.Call):
  """Tiles and layouts shared by the two directions.

  Attributes:
    count: of the streams.
    columns: logits, in whole registers.
    dtype: of the streams.
    stacks: dtypes of the new streams, of the gradients of products, and of all
      that new streams get, in scratch; the last two are one if equal.
  """

  def __init__(
    self, streams: tuple[jax.Array, ...], y: jax.Array, weight_MDC: jax.Array
  ):
    super().__init__([y])
    self.count, _, columns = weight_MDC.shape
    self.columns = columns + -columns % tpu_rows.SUBLANES
    self.dtype = streams[0].dtype
    self.tile, self.tiles = _TILE, pl.cdiv(self.tokens, _TILE)
    self.parts = math.gcd(self.tiles, _PARTS)
    self._vectors = self.count * self.dtype.itemsize, y.dtype.itemsize
    self.stacks = [self.dtype, jnp.dtype(jnp.float32)]
    if self.dtype != jnp.float32:
      self.stacks.append(self.dtype)

  def moved_bytes(self, backward: bool) -> int:
    """Read and written per token."""
    streams, y = self._vectors
    rows = self.count * (self.count + 1) + self.columns + self.count
    return self.width * (
      (3 * streams + 3 * y) if backward else 2 * (streams + y)
    ) + 4 * (2 if backward else 1) * (rows + 1)

  def vmem_bytes(self, backward: bool) -> int:
    """Of two buffers of every block, and scratch."""
    weights = self.count * self.columns * self.width
    tiles = 2 * self.tile * self.moved_bytes(backward)
    if not backward:
      return tiles + 2 * weights * self.dtype.itemsize
    stacks = sum(dtype.itemsize for dtype in self.stacks)
    stacks *= self.count * self.tile * self.width
    return tiles + stacks + 2 * weights * (self.dtype.itemsize + 4)

  def estimate(self, backward: bool) -> pl.CostEstimate:
    pairs = self.count * (self.count + 1)
    flops = 6 * pairs if backward else 2 * pairs + 4 * self.count
    flops += (6 if backward else 2) * self.count * self.columns
    return pl.CostEstimate(
      flops=flops * self.tokens * self.width,
      bytes_accessed=self.tokens * self.moved_bytes(backward),
      transcendentals=(self.count + 1) * self.tokens,
    )

  def small(
    self, weight_MDC: jax.Array, bias_M: jax.Array, scale: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Bias and scale of the gates [M, 2], and the weight [M, C, D]."""
    gate_M2 = jnp.stack([bias_M, jnp.broadcast_to(scale, bias_M.shape)], 1)
    weight_MCD = jnp.swapaxes(weight_MDC, 1, 2).astype(self.dtype)
    missing = self.columns - weight_MCD.shape[1]
    if missing:
      weight_MCD = jnp.pad(weight_MCD, ((0, 0), (0, missing), (0, 0)))
    return gate_M2, weight_MCD

  def factors(self, write_MT: jax.Array, mix_MMT: jax.Array) -> jax.Array:
    """Row (j, i): of old stream i in the new stream j; the last i is y."""
    both = jnp.swapaxes(mix_MMT, 0, 1), write_MT[:, None]
    both = jnp.concatenate(both, axis=1)
    return both.reshape(-1, self.tokens)

  def rows(self, x: jax.Array) -> jax.Array:
    """[C, *T] to [rows, tokens]."""
    x = x.reshape(-1, self.tokens)
    return jnp.pad(x, ((0, self.columns - x.shape[0]), (0, 0)))

  def row_spec(self, rows: int) -> pl.BlockSpec:
    return pl.BlockSpec((rows, self.tile), lambda *i: (0, self.at(*i)))

  def row_struct(self, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, self.tokens), jnp.float32)


def _forward_kernel(
  gate_ref: Any, weight_ref: Any, factors_ref: Any, *refs: Any, count: int,
  eps: float,
) -> None:  # fmt: skip
  """Bias and scale [M, 2], weight [M, C, D], factors [M (M + 1), tile].

  Then M streams and y [tile, D]; the results: M new streams and h [tile, D],
  logits [C, tile], inverse norm [1, tile]; and scratch for squares [tile, 128].
  """
  x_refs, (y_ref, *others) = refs[:count], refs[count:]
  new_refs = others[:count]
  h_ref, logits_ref, inverse_ref, square_ref = others[count:]
  tile, width = y_ref.shape
  factors = _to_columns(factors_ref[...])
  for rows in _groups(tile):
    square = jnp.zeros((tpu_rows.ROWS, tpu_rows.LANES), jnp.float32)
    for lanes in _chunks(width):
      old = [_load(ref, rows, lanes) for ref in (*x_refs, y_ref)]
      for j, x in enumerate(_written(old, factors[rows])):
        x = x.astype(new_refs[j].dtype)
        new_refs[j][rows, lanes] = x
        x = x.astype(jnp.float32)
        square += _fold(x * x)
    square_ref[rows, :] = square
  mean = _lane_sums(square_ref[...]) * (1.0 / (count * width))
  inverse = jax.lax.rsqrt(mean + eps)
  exact = weight_ref.dtype == jnp.float32
  product = _total(
    tpu_rows.dot(weight_ref[j], new_refs[j][...], 1, exact=exact)
    for j in range(count)
  )
  logits = product * inverse
  logits_ref[...] = logits
  inverse_ref[...] = inverse
  read = _to_columns(_gates(gate_ref, logits, count))
  for rows in _groups(tile):
    for lanes in _chunks(width):
      h = _total(
        read[rows, j : j + 1] * _load(new_refs[j], rows, lanes)
        for j in range(count)
      )
      h_ref[rows, lanes] = h.astype(h_ref.dtype)


def _backward_kernel(
  gate_ref: Any, weight_ref: Any, factors_ref: Any, logits_ref: Any,
  inverse_ref: Any, dlogits_ref: Any, *refs: Any, count: int, tokens: int,
) -> None:  # fmt: skip
  """As forward, then logits [C, tile], inverse norm, gradients of logits.

  Then M streams, y, the gradients of M new streams and of h [tile, D]. The
  results: gradients of M streams and y, of factors [M (M + 1), tile], of gates
  [M, tile], and of the weight, summed over steps [1, M, C, D]; and scratch, the
  `stacks` of `Call`.
  """
  x_refs, (y_ref, *rest) = refs[:count], refs[count:]
  dnew_refs, (dh_ref, *rest) = rest[:count], rest[count:]
  dx_refs, (dy_ref, *rest) = rest[:count], rest[count:]
  dfactors_ref, dgate_ref, dweight_ref, *stacks = rest
  tile, width = y_ref.shape
  new, *later = (_Stack(ref, count) for ref in stacks)
  # Updated in place if both are float32.
  sent, total = later[0], later[-1]
  olds, dolds = (*x_refs, y_ref), (*dx_refs, dy_ref)
  step = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
  left = tokens - step * tile if tokens % tile else None

  @pl.when(pl.program_id(1) == 0)
  def _():
    dweight_ref[...] = jnp.zeros_like(dweight_ref)

  # The new streams once more, and the gradients of the gates.
  factors = _to_columns(factors_ref[...])
  for rows in _groups(tile):
    for lanes in _chunks(width):
      old = [_load(ref, rows, lanes) for ref in olds]
      for j, x in enumerate(_written(old, factors[rows])):
        new.put(j, rows, lanes, _tokens_only(x, rows, left))
  dread = [_dot(new, j, dh_ref) for j in range(count)]
  logits, inverse = logits_ref[...], inverse_ref[...]
  gate = _gates(gate_ref, logits, count)
  dgate = jnp.concatenate(dread) * gate * (1 - gate)
  dgate_ref[...] = dgate
  # Through the norm, to the products.
  dlogits = dlogits_ref[...]
  dread = dlogits[:count] + gate_ref[:, 1:] * dgate
  dlogits = jnp.concatenate([dread, dlogits[count:]])
  along = jnp.sum(dlogits * logits, axis=0, keepdims=True)
  bend = along * inverse * inverse * (1.0 / (count * width))
  dproduct = dlogits * inverse
  if left is not None:
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, tile), 1)
    dproduct = jnp.where(lane < left, dproduct, 0.0)
  low = dproduct.astype(new.dtype)
  turned = _to_columns(dproduct).astype(new.dtype)
  exact = new.dtype == jnp.float32
  for j in range(count):
    dweight_ref[0, j] += tpu_rows.dot(low, new.stream(j), exact=exact)
    sent.put_stream(j, tpu_rows.dot(turned, weight_ref[j], exact=exact))
  # All that the new streams get, which goes back to the old ones.
  small = _to_columns(jnp.concatenate([gate, bend]))
  for rows in _groups(tile):
    for lanes in _chunks(width):
      dh = _load(dh_ref, rows, lanes)
      totals = []
      for j, ref in enumerate(dnew_refs):
        x = _load(ref, rows, lanes) + sent.get(j, rows, lanes)
        x += small[rows, j : j + 1] * dh
        x -= small[rows, count : count + 1] * new.get(j, rows, lanes)
        totals.append(_tokens_only(x, rows, left))
        total.put(j, rows, lanes, totals[-1])
      for i, ref in enumerate(dolds):
        dx = _total(
          factors[rows, k : k + 1] * x
          for k, x in zip(range(i, factors.shape[1], count + 1), totals)
        )
        ref[rows, lanes] = dx.astype(ref.dtype)
  for j, k in itertools.product(range(count), range(count + 1)):
    dfactor = _dot(total, j, olds[k])
    dfactors_ref[j * (count + 1) + k : j * (count + 1) + k + 1, :] = dfactor


class _Stack:
  """One of `Call.stacks`: [(stream, token), D]."""

  def __init__(self, ref: Any, count: int):
    self.dtype, self._ref = ref.dtype, ref
    self._tile = ref.shape[0] // count

  def _rows(self, j: int, rows: slice) -> slice:
    return slice(j * self._tile + rows.start, j * self._tile + rows.stop)

  def put(self, j: int, rows: slice, lanes: slice, x: jax.Array) -> None:
    self._ref[self._rows(j, rows), lanes] = x.astype(self.dtype)

  def get(self, j: int, rows: slice, lanes: slice) -> jax.Array:
    return _load(self._ref, self._rows(j, rows), lanes)

  def put_stream(self, j: int, x_TD: jax.Array) -> None:
    self._ref[self._rows(j, slice(0, self._tile)), :] = x_TD

  def stream(self, j: int) -> jax.Array:
    return self._ref[self._rows(j, slice(0, self._tile)), :]


def _dot(stack: "_Stack", j: int, ref: Any) -> jax.Array:
  """Products of each token with the same token of another array [1, tokens]."""
  parts = []
  for rows in _groups(ref.shape[0]):
    part = jnp.zeros((tpu_rows.ROWS, tpu_rows.LANES), jnp.float32)
    for lanes in _chunks(ref.shape[1]):
      part += _fold(stack.get(j, rows, lanes) * _load(ref, rows, lanes))
    parts.append(part)
  return _lane_sums(jnp.concatenate(parts))


def _written(old: list[jax.Array], factors: jax.Array) -> Iterator[jax.Array]:
  """The new streams, given the old ones and y, and the factors in columns."""
  for j in range(len(old) - 1):
    k = j * len(old)
    yield _total(factors[:, k + i : k + i + 1] * x for i, x in enumerate(old))


def _gates(gate_ref: Any, logits: jax.Array, count: int) -> jax.Array:
  return jax.nn.sigmoid(gate_ref[:, :1] + gate_ref[:, 1:] * logits[:count])


def _tokens_only(x: jax.Array, rows: slice, left: Any) -> jax.Array:
  """Zeros in rows that are no tokens, if the last tile is a part of one."""
  if left is None:
    return x
  row = jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
  return jnp.where(row < left - rows.start, x, 0.0)


def _load(ref: Any, rows: slice, lanes: slice) -> jax.Array:
  return ref[rows, lanes].astype(jnp.float32)


def _to_columns(x: jax.Array) -> jax.Array:
  """[rows, tokens] to [tokens, rows]."""
  missing = -x.shape[0] % tpu_rows.SUBLANES
  if missing:
    zeros = jnp.zeros((missing, x.shape[1]), x.dtype)
    x = jnp.concatenate([x, zeros])
  return jnp.transpose(x)


def _lane_sums(x: jax.Array) -> jax.Array:
  """[tokens, lanes] to their sums [1, tokens]."""
  return jnp.sum(jnp.transpose(x), axis=0, keepdims=True)


def _fold(x: jax.Array) -> jax.Array:
  """Sums columns down to one register of lanes."""
  full = x.shape[1] // tpu_rows.LANES * tpu_rows.LANES
  parts = (x[:, i : i + tpu_rows.LANES] for i in range(0, full, tpu_rows.LANES))
  folded: Any = sum(parts)  # Zero if there is none.
  if full == x.shape[1]:
    return folded
  lane = jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], tpu_rows.LANES), 1)
  rest = jnp.sum(x[:, full:], axis=1, keepdims=True)
  return folded + jnp.where(lane == 0, rest, 0.0)


def _total(terms: Iterable[jax.Array]) -> jax.Array:
  return functools.reduce(jnp.add, terms)


def _groups(tile: int) -> Iterator[slice]:
  for first in range(0, tile, tpu_rows.ROWS):
    yield slice(first, first + tpu_rows.ROWS)


def _chunks(width: int) -> Iterator[slice]:
  for start in range(0, width, _CHUNK):
    yield slice(start, min(start + _CHUNK, width))
