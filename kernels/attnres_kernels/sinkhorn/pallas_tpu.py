# SPDX-License-Identifier: Apache-2.0
"""The op on TPU: every entry of a matrix is a register of 1024 tokens.

Rows and columns of K = exp(logits) are scaled in turn. Scaling keeps the form
K_ij / (r_i c_j), so an iteration updates only r and c:

  r = K / c,  c = K' / r

A grid step runs all iterations of its tokens, in registers. Backward, r and c
of each iteration are in scratch. Its gradients are by the logarithms of r, c
and K, which stay bounded, unlike those by r, c and K.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels import dispatch

_REGISTER = 8, 128
_LEAST = 1e-20  # Added to exp(logits) <= 1: then no column vanishes.
_MOST = 8  # Rows: beyond, programs grow too long.


def why_not(
  function: str, logits: jax.Array, *args: Any, **options: Any
) -> str | None:
  """The reason why these arguments cannot run, or None."""
  if logits.dtype != jnp.float32:
    return f"logits must be float32, got {logits.dtype}"
  if not 1 <= logits.shape[0] <= _MOST:
    return f"at most {_MOST} rows, got {logits.shape[0]}"
  if not logits.size:
    return "there are no tokens"
  return None


def forward(
  logits_MMT: jax.Array, *, iterations: int, interpret: Any = False
) -> jax.Array:
  """See `api.sinkhorn`."""
  return _call(
    _forward_kernel, "sinkhorn_forward", [logits_MMT], iterations, interpret
  )


def backward(
  logits_MMT: jax.Array, gradient_MMT: jax.Array, *, iterations: int,
  interpret: Any = False,
) -> tuple[jax.Array]:  # fmt: skip
  """The gradient of the logits."""
  arrays = [logits_MMT, gradient_MMT]
  dlogits_MMT = _call(
    _backward_kernel, "sinkhorn_backward", arrays, iterations, interpret
  )
  return (dlogits_MMT,)


def _call(
  kernel: Callable[..., None], name: str, arrays: list[jax.Array],
  iterations: int, interpret: Any,
) -> jax.Array:  # fmt: skip
  shape = arrays[0].shape
  count, tokens = shape[0], math.prod(shape[2:])
  missing = -tokens % math.prod(_REGISTER)
  registers = (tokens + missing) // math.prod(_REGISTER)
  entries = count * count
  scratch = []
  if len(arrays) > 1:
    steps = iterations + 1, 2, count, *_REGISTER
    scratch = [pltpu.VMEM(steps, jnp.float32)]
  laid_out = entries, registers * _REGISTER[0], _REGISTER[1]
  spec = pl.BlockSpec((entries, *_REGISTER), lambda i: (0, i, 0))
  padded = (
    jnp.pad(x.reshape(entries, tokens), ((0, 0), (0, missing))) for x in arrays
  )
  operations = 4 * entries * len(arrays) ** 2 * iterations
  result = pl.pallas_call(
    functools.partial(kernel, count=count, iterations=iterations),
    grid=(registers,),
    in_specs=[spec for _ in arrays],
    out_specs=spec,
    out_shape=jax.ShapeDtypeStruct(laid_out, jnp.float32),
    scratch_shapes=scratch,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",),
      vmem_limit_bytes=dispatch.tpu_vmem_bytes(),
    ),
    cost_estimate=pl.CostEstimate(
      flops=operations * tokens,
      bytes_accessed=4 * entries * (len(arrays) + 1) * tokens,
      transcendentals=(entries + 2 * count * iterations) * tokens,
    ),
    interpret=interpret,
    name=name,
  )(*(x.reshape(laid_out) for x in padded))
  return result.reshape(entries, -1)[:, :tokens].reshape(shape)


def _forward_kernel(
  logits_ref: Any, out_ref: Any, *, count: int, iterations: int
) -> None:
  """Logits and the result, a register of tokens per entry [M M, 8, 128]."""
  matrix = _exp(logits_ref, count)
  row, column = _iterate(matrix, iterations, None)
  for i in range(count):
    for j in range(count):
      out_ref[i * count + j] = matrix[i][j] / (row[i] * column[j])


def _backward_kernel(
  logits_ref: Any, gradient_ref: Any, out_ref: Any, steps_ref: Any, *,
  count: int, iterations: int,
) -> None:  # fmt: skip
  """Logits, the gradient of the result, and that of the logits [M M, 8, 128].

  Then scratch: r and c after each iteration [iterations + 1, 2, M, 8, 128].
  """
  both = range(count)
  matrix = _exp(logits_ref, count)
  row, column = _iterate(matrix, iterations, steps_ref)
  result = [
    [
      gradient_ref[i * count + j] * (matrix[i][j] / (row[i] * column[j]))
      for j in both
    ]
    for i in both
  ]
  transposed = list(zip(*matrix))

  def back(i, carry):
    # Iterations from the last; before the first, c is one.
    share, by_row, by_column = carry
    at = iterations - i
    row = [1 / steps_ref[at, 0, k] for k in both]
    column = [1 / steps_ref[at, 1, k] for k in both]
    before = [1 / steps_ref[at - 1, 1, k] for k in both]
    of_column = [a * b for a, b in zip(by_column, column)]
    sums = _product(matrix, of_column)
    of_row = [(a - b * r) * r for a, b, r in zip(by_row, sums, row)]
    share = [
      [
        share[i][j] + of_column[j] * row[i] + of_row[i] * before[j]
        for j in both
      ]
      for i in both
    ]
    sums = _product(transposed, of_row)
    by_column = [-a * b for a, b in zip(sums, before)]
    return share, [jnp.zeros_like(x) for x in by_row], by_column

  zero = jnp.zeros(_REGISTER, jnp.float32)
  start = (
    [[zero for _ in both] for _ in both],
    [-sum(entries) for entries in result],
    [-sum(entries) for entries in zip(*result)],
  )
  share, _, _ = jax.lax.fori_loop(0, iterations, back, start)
  for i in both:
    for j in both:
      out_ref[i * count + j] = result[i][j] + matrix[i][j] * share[i][j]


def _exp(ref: Any, count: int) -> list[list[jax.Array]]:
  """K, as rows of registers."""
  rows = [[ref[i * count + j] for j in range(count)] for i in range(count)]
  tops = [functools.reduce(jnp.maximum, row) for row in rows]
  return [
    [jnp.exp(x - top) + _LEAST for x in row] for row, top in zip(rows, tops)
  ]


def _iterate(matrix: Any, iterations: int, steps_ref: Any) -> tuple[Any, Any]:
  """The last r and c; in `steps_ref`, those after each iteration, from 0."""
  transposed = list(zip(*matrix))

  def save(i, row, column):
    if steps_ref is not None:
      for k, (r, c) in enumerate(zip(row, column)):
        steps_ref[i, 0, k], steps_ref[i, 1, k] = r, c

  def step(i, last):
    row = _product(matrix, [1 / c for c in last[1]])
    column = _product(transposed, [1 / r for r in row])
    save(i + 1, row, column)
    return row, column

  ones = [jnp.ones(_REGISTER, jnp.float32) for _ in matrix]
  save(0, ones, ones)
  return jax.lax.fori_loop(0, iterations, step, (ones, ones))


def _product(matrix: Any, vector: Any) -> list[jax.Array]:
  return [
    functools.reduce(jnp.add, map(jnp.multiply, row, vector)) for row in matrix
  ]
