# SPDX-License-Identifier: Apache-2.0
"""The norm on TPU: 16 rows at a time, each read and written once."""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels.depth_merge import pallas_tpu as rows_lib


def why_not(
  function: str, x: jax.Array, gain: jax.Array, *args: Any, eps: float
) -> str | None:
  """The reason why these arguments cannot run, or None."""
  del function, gain, args, eps
  if x.dtype not in (jnp.bfloat16, jnp.float32):
    return f"x must be bfloat16 or float32, got {x.dtype}"
  return None


def forward(
  x_TD: jax.Array, gain_D: jax.Array, *, eps: float, interpret: Any = False
) -> jax.Array:
  call = rows_lib.Call([x_TD, x_TD])
  gain = gain_D[None]
  y = pl.pallas_call(
    functools.partial(_forward_kernel, eps=eps),
    grid=(call.tiles,),
    in_specs=[rows_lib.constant_spec(gain), call.wide_spec(lambda t: t)],
    out_specs=call.wide_spec(lambda t: t),
    out_shape=jax.ShapeDtypeStruct((call.tokens, call.width), x_TD.dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",),
      vmem_limit_bytes=call.vmem_limit(),
    ),
    cost_estimate=call.cost(flops=4),
    interpret=interpret,
    name="rms_norm_forward",
  )(gain, call.flat(x_TD))
  return y.reshape(x_TD.shape)


def backward(
  x_TD: jax.Array, gain_D: jax.Array, dy_TD: jax.Array, *, eps: float,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
  """Returns the gradients of x and gain."""
  call = rows_lib.Call([x_TD, dy_TD, x_TD])
  # Every part of the outer axis sums its own gradient of the gain, in order.
  parts = max(p for p in range(1, 9) if call.tiles % p == 0)
  steps = call.tiles // parts

  def at(p, s):
    return p * steps + s

  gain = gain_D[None]
  sums = (parts, rows_lib.SUBLANES, call.width)
  dx, dgain = pl.pallas_call(
    functools.partial(_backward_kernel, num_tokens=call.tokens, eps=eps),
    grid=(parts, steps),
    in_specs=[
      rows_lib.constant_spec(gain),
      call.wide_spec(at),
      call.wide_spec(at),
    ],
    out_specs=[
      call.wide_spec(at),
      pl.BlockSpec((1, *sums[1:]), lambda p, s: (p, 0, 0)),
    ],
    out_shape=[
      jax.ShapeDtypeStruct((call.tokens, call.width), x_TD.dtype),
      jax.ShapeDtypeStruct(sums, jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"),
      vmem_limit_bytes=call.vmem_limit(),
    ),
    cost_estimate=call.cost(flops=10),
    interpret=interpret,
    name="rms_norm_backward",
  )(gain, call.flat(x_TD), call.flat(dy_TD))
  return dx.reshape(x_TD.shape), dgain.sum(axis=(0, 1))


def _forward_kernel(
  gain_ref: Any, x_ref: Any, y_ref: Any, *, eps: float
) -> None:
  """Gain [1, D], x and the result [tile, D]."""
  for start in range(0, x_ref.shape[0], rows_lib.ROWS):
    rows = slice(start, start + rows_lib.ROWS)
    x = rows_lib.load_rows(x_ref, rows)
    y = x * jax.lax.rsqrt(rows_lib.mean(x * x) + eps) * gain_ref[...]
    y_ref[rows, :] = y.astype(y_ref.dtype)


def _backward_kernel(
  gain_ref: Any, x_ref: Any, dy_ref: Any, dx_ref: Any, sums_ref: Any, *,
  num_tokens: int, eps: float,
) -> None:  # fmt: skip
  """Gain [1, D], x and the gradient of the result [tile, D].

  Then the results: the gradient of x [tile, D], and that of the gain, summed
  over steps [1, 8, D].
  """

  @pl.when(pl.program_id(1) == 0)
  def _():
    sums_ref[...] = jnp.zeros_like(sums_ref)

  tile = x_ref.shape[0]
  step = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
  for start in range(0, tile, rows_lib.ROWS):
    rows = slice(start, start + rows_lib.ROWS)
    valid = rows_lib.valid_rows(num_tokens, tile, step * tile + start)
    x = rows_lib.load_rows(x_ref, rows, valid)
    dy = rows_lib.load_rows(dy_ref, rows, valid)
    inverse = jax.lax.rsqrt(rows_lib.mean(x * x) + eps)
    if valid is not None:
      # Without an eps, it is infinite in rows of padding, which are zero.
      inverse = jnp.where(valid, inverse, 0.0)
    x *= inverse
    sums_ref[0] += rows_lib.fold(dy * x)
    dy *= gain_ref[...]
    dx = inverse * (dy - rows_lib.mean(dy * x) * x)
    dx_ref[rows, :] = dx.astype(dx_ref.dtype)
