# SPDX-License-Identifier: Apache-2.0
"""The op in plain JAX: one loop over the iterations, all tokens at once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from attnres_kernels.sinkhorn import api


def forward(logits_MMT: jax.Array, *, iterations: int) -> jax.Array:
  """See `api.sinkhorn`."""
  kernel, (row_MT, column_MT), _ = _iterate(logits_MMT, iterations)
  return kernel / (row_MT[:, None] * column_MT[None])


def backward(
  logits_MMT: jax.Array, gradient_MMT: jax.Array, *, iterations: int
) -> tuple[jax.Array]:
  """The gradient of the logits."""
  kernel, (row_MT, column_MT), steps = _iterate(logits_MMT, iterations)
  transposed = kernel.swapaxes(0, 1)
  # That by log K is its part from the result, plus K * `share`.
  result = gradient_MMT * (kernel / (row_MT[:, None] * column_MT[None]))
  by_row, by_column = -jnp.sum(result, axis=1), -jnp.sum(result, axis=0)

  def back(carry: Any, step: Any) -> tuple[Any, None]:
    share, by_row, by_column = carry
    before_MT, row_MT, column_MT = step
    # Divided last, because XLA would repeat a product for each of its uses.
    of_column = by_column / column_MT
    of_row = (by_row - _product(kernel, of_column) / row_MT) / row_MT
    share += of_column[None] / row_MT[:, None]
    share += of_row[:, None] / before_MT[None]
    by_column = -_product(transposed, of_row) / before_MT
    return (share, jnp.zeros_like(by_row), by_column), None

  start = jnp.zeros_like(kernel), by_row, by_column
  (share, _, _), _ = jax.lax.scan(back, start, steps, reverse=True)
  return (result + kernel * share,)


def _iterate(logits_MMT: jax.Array, iterations: int) -> tuple[Any, ...]:
  """K, the last r and c, and of every iteration c before it, then r and c."""
  highest = jnp.max(logits_MMT, axis=1, keepdims=True)
  kernel = jnp.exp(logits_MMT - highest) + api.LEAST

  def step(last: Any, _: None) -> tuple[Any, Any]:
    _, before_MT = last
    row_MT = _product(kernel, 1 / before_MT)
    column_MT = _product(kernel.swapaxes(0, 1), 1 / row_MT)
    return (row_MT, column_MT), (before_MT, row_MT, column_MT)

  ones_MT = jnp.ones_like(kernel[0])
  last, steps = jax.lax.scan(step, (ones_MT, ones_MT), length=iterations)
  return kernel, last, steps


def _product(matrix_MMT: jax.Array, vector_MT: jax.Array) -> jax.Array:
  """Matrix times vector, for every token.

  Its sums are written out: on a CPU, XLA reduces so few entries in a scalar
  loop, which is 20 times slower.
  """
  return functools.reduce(
    jnp.add,
    (matrix_MMT[:, j] * v_T[None] for j, v_T in enumerate(vector_MT)),
  )
