# SPDX-License-Identifier: Apache-2.0
"""The norm on TPU: 16 rows at a time, each read and written once.

Gated heads stay side by side, [tokens, N H]; a grid step has one of them.
"""

from collections.abc import Iterator
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels import pallas_tpu_rows as tpu_rows
from attnres_kernels.depth_merge import pallas_tpu as merge_lib

# Tokens of a step that has one head only, which is a fraction of a row.
_HEAD_TILE = 1024

why_slow = tpu_rows.why_slow


def why_not(
  function: str, x: jax.Array, gain: jax.Array, gate: Any, *args: Any,
  **options: Any,
) -> str | None:  # fmt: skip
  """The reason why these arguments cannot run, or None."""
  if x.dtype not in (jnp.bfloat16, jnp.float32):
    return f"x must be bfloat16 or float32, got {x.dtype}"
  if gate is not None and x.shape[-1] % tpu_rows.LANES:
    return f"heads must be multiples of 128 wide, got {x.shape}"
  return None


def forward(
  x_TD: jax.Array, gain_D: jax.Array, gate_TD: jax.Array | None, *, eps: float,
  interpret: Any = False,
) -> jax.Array:  # fmt: skip
  rows = _Rows(x_TD, gate_TD, arrays=3)
  y = pl.pallas_call(
    functools.partial(_forward_kernel, eps=eps),
    grid=(rows.heads, rows.call.tiles),
    in_specs=rows.in_specs(gain_D),
    out_specs=rows.spec,
    out_shape=rows.like,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel"),
      vmem_limit_bytes=rows.call.vmem_limit(),
    ),
    cost_estimate=rows.cost(4),
    interpret=interpret,
    name="rms_norm_forward",
  )(*rows.operands(gain_D))
  return y.reshape(x_TD.shape)


def backward(
  x_TD: jax.Array, gain_D: jax.Array, gate_TD: jax.Array | None,
  dy_TD: jax.Array, *, eps: float, interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:  # fmt: skip
  """Returns the gradients of x, gain and gate (None without a gate)."""
  rows = _Rows(x_TD, gate_TD, dy_TD, arrays=5)
  call = rows.call
  sums = rows.heads, call.parts, tpu_rows.SUBLANES, call.width
  dx, dgain, *dgates = pl.pallas_call(
    functools.partial(_backward_kernel, num_tokens=call.tokens, eps=eps),
    grid=(rows.heads, call.parts, call.tiles // call.parts),
    in_specs=rows.in_specs(gain_D),
    out_specs=[
      rows.spec,
      pl.BlockSpec((1, 1, *sums[2:]), lambda n, p, s: (n, p, 0, 0)),
      *rows.gate_outputs([rows.spec]),
    ],
    out_shape=[
      rows.like,
      jax.ShapeDtypeStruct(sums, jnp.float32),
      *rows.gate_outputs([rows.like]),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary"),
      vmem_limit_bytes=call.vmem_limit(),
    ),
    cost_estimate=rows.cost(10),
    interpret=interpret,
    name="rms_norm_backward",
  )(*rows.operands(gain_D))
  dgain = dgain.sum(axis=(0, 1, 2))
  # As many as autodiff of the plain form returns: a switch by platform has
  # branches of one structure.
  dgate = dgates[0].reshape(x_TD.shape) if dgates else None
  return dx.reshape(x_TD.shape), dgain, dgate


class _Rows:
  """Arrays [*T, D], or [*T, N, D] with a gate, as rows of tokens."""

  def __init__(
    self, x: jax.Array, gate: jax.Array | None, *others: jax.Array, arrays: int
  ):
    self.gated = gate is not None
    self.heads = x.shape[-2] if self.gated else 1
    self.arrays = [a for a in (x, gate, *others) if a is not None]
    slab = jax.ShapeDtypeStruct(
      (x.size // self.heads // x.shape[-1], x.shape[-1]), x.dtype
    )
    most = _HEAD_TILE if self.gated else tpu_rows.LANES
    count = arrays if self.gated else arrays - len(others) - 1
    self.call = tpu_rows.Call([slab] * count, most)
    shape = slab.shape[0], self.heads * slab.shape[1]
    self.like = jax.ShapeDtypeStruct(shape, x.dtype)
    self.spec = pl.BlockSpec(
      (self.call.tile, slab.shape[1]), lambda n, *i: (self.call.at(*i), n)
    )

  def operands(self, gain_D: jax.Array) -> Iterator[jax.Array]:
    yield gain_D[None]
    for array in self.arrays:
      yield array.reshape(self.like.shape)

  def in_specs(self, gain_D: jax.Array) -> list[pl.BlockSpec]:
    gain = tpu_rows.constant_spec((1, *gain_D.shape))
    return [gain, *[self.spec] * len(self.arrays)]

  def gate_outputs(self, outputs: list[Any]) -> list[Any]:
    return outputs if self.gated else []

  def cost(self, flops: int) -> pl.CostEstimate:
    return pl.CostEstimate(
      flops=flops * self.like.size,
      bytes_accessed=self.heads * self.call.tokens * self.call.token_bytes,
      transcendentals=self.like.size if self.gated else self.call.tokens,
    )


def _forward_kernel(gain_ref: Any, x_ref: Any, *refs: Any, eps: float) -> None:
  """Gain [1, D], x, the gate if there is one, and the result [tile, D]."""
  *gate_ref, y_ref = refs
  # 16 rows are a whole tile of bfloat16; 8 would load every tile twice. Rows of
  # padding need no mask here: no row reads another, and none of them is stored.
  for start in range(0, x_ref.shape[0], tpu_rows.ROWS):
    rows = slice(start, start + tpu_rows.ROWS)
    x = tpu_rows.load_rows(x_ref, rows)
    y = x * jax.lax.rsqrt(merge_lib.mean(x * x) + eps) * gain_ref[...]
    for gate in gate_ref:
      y *= jax.nn.sigmoid(tpu_rows.load_rows(gate, rows))
    y_ref[rows, :] = y.astype(y_ref.dtype)


def _backward_kernel(
  gain_ref: Any, x_ref: Any, *refs: Any, num_tokens: int, eps: float
) -> None:
  """Gain [1, D], x, the gate if there is one, the gradient of the result.

  Then the results: the gradient of x [tile, D], that of the gain, summed over
  steps [1, 1, 8, D], and that of the gate.
  """
  gate_ref, dgate_ref = None, None
  if len(refs) == 3:
    dy_ref, dx_ref, sums_ref = refs
  else:
    gate_ref, dy_ref, dx_ref, sums_ref, dgate_ref = refs

  # The steps of a part run in order and add to the same block, which holds
  # anything before the first of them.
  @pl.when(pl.program_id(2) == 0)
  def _():
    sums_ref[...] = jnp.zeros_like(sums_ref)

  tile = x_ref.shape[0]
  step = pl.program_id(1) * pl.num_programs(2) + pl.program_id(2)
  for start in range(0, tile, tpu_rows.ROWS):
    rows = slice(start, start + tpu_rows.ROWS)
    # The gain's gradient adds up rows, so that a NaN in padding would reach it.
    valid = tpu_rows.valid_rows(num_tokens, tile, step * tile + start)
    x = tpu_rows.load_rows(x_ref, rows, valid)
    dy = tpu_rows.load_rows(dy_ref, rows, valid)
    inverse = jax.lax.rsqrt(merge_lib.mean(x * x) + eps)
    if valid is not None:
      # Without an eps, it is infinite in rows of padding, which are zero.
      inverse = jnp.where(valid, inverse, 0.0)
    x *= inverse
    if gate_ref is not None and dgate_ref is not None:
      gate = jax.nn.sigmoid(tpu_rows.load_rows(gate_ref, rows, valid))
      dgate = dy * x * gain_ref[...] * gate * (1 - gate)
      dgate_ref[rows, :] = dgate.astype(dgate_ref.dtype)
      dy *= gate
    sums_ref[0, 0] += merge_lib.fold(dy * x)
    dy *= gain_ref[...]
    dx = inverse * (dy - merge_lib.mean(dy * x) * x)
    dx_ref[rows, :] = dx.astype(dx_ref.dtype)
