# SPDX-License-Identifier: Apache-2.0
"""The norm on TPU: 16 rows at a time, each read and written once."""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels import pallas_tpu_rows as tpu_rows
from attnres_kernels.depth_merge import pallas_tpu as merge_lib


def why_not(function: str, x: jax.Array, *args: Any, **options: Any) -> Any:
  """The reason why these arguments cannot run, or None."""
  if x.dtype not in (jnp.bfloat16, jnp.float32):
    return f"x must be bfloat16 or float32, got {x.dtype}"
  return None


def forward(
  x_TD: jax.Array, gain_D: jax.Array, *, eps: float, interpret: Any = False
) -> jax.Array:
  call = tpu_rows.Call([x_TD, x_TD])
  gain = gain_D[None]
  y = pl.pallas_call(
    functools.partial(_forward_kernel, eps=eps),
    grid=(call.tiles,),
    in_specs=[tpu_rows.constant_spec(gain.shape), call.wide_spec()],
    out_specs=call.wide_spec(),
    out_shape=call.like(x_TD),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",), vmem_limit_bytes=call.vmem_limit()
    ),
    cost_estimate=call.cost(4, 1),
    interpret=interpret,
    name="rms_norm_forward",
  )(gain, call.flat(x_TD))
  return y.reshape(x_TD.shape)


def backward(
  x_TD: jax.Array, gain_D: jax.Array, dy_TD: jax.Array, *, eps: float,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
  """Returns the gradients of x and gain."""
  call = tpu_rows.Call([x_TD, dy_TD, x_TD])
  gain = gain_D[None]
  sums = call.parts, tpu_rows.SUBLANES, call.width
  dx, dgain = pl.pallas_call(
    functools.partial(_backward_kernel, num_tokens=call.tokens, eps=eps),
    grid=(call.parts, call.tiles // call.parts),
    in_specs=[tpu_rows.constant_spec(gain.shape), *[call.wide_spec()] * 2],
    out_specs=[call.wide_spec(), tpu_rows.sums_spec(sums)],
    out_shape=[call.like(x_TD), jax.ShapeDtypeStruct(sums, jnp.float32)],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"),
      vmem_limit_bytes=call.vmem_limit(),
    ),
    cost_estimate=call.cost(10, 1),
    interpret=interpret,
    name="rms_norm_backward",
  )(gain, call.flat(x_TD), call.flat(dy_TD))
  return dx.reshape(x_TD.shape), dgain.sum(axis=(0, 1))


def _forward_kernel(
  gain_ref: Any, x_ref: Any, y_ref: Any, *, eps: float
) -> None:
  """Gain [1, D], x and the result [tile, D]."""
  for start in range(0, x_ref.shape[0], tpu_rows.ROWS):
    rows = slice(start, start + tpu_rows.ROWS)
    x = tpu_rows.load_rows(x_ref, rows)
    y = x * jax.lax.rsqrt(merge_lib.mean(x * x) + eps) * gain_ref[...]
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
  for start in range(0, tile, tpu_rows.ROWS):
    rows = slice(start, start + tpu_rows.ROWS)
    valid = tpu_rows.valid_rows(num_tokens, tile, step * tile + start)
    x = tpu_rows.load_rows(x_ref, rows, valid)
    dy = tpu_rows.load_rows(dy_ref, rows, valid)
    inverse = jax.lax.rsqrt(merge_lib.mean(x * x) + eps)
    if valid is not None:
      # Without an eps, it is infinite in rows of padding, which are zero.
      inverse = jnp.where(valid, inverse, 0.0)
    x *= inverse
    sums_ref[0] += merge_lib.fold(dy * x)
    dy *= gain_ref[...]
    dx = inverse * (dy - merge_lib.mean(dy * x) * x)
    dx_ref[rows, :] = dx.astype(dx_ref.dtype)
