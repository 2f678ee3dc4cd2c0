# SPDX-License-Identifier: Apache-2.0
"""Muon: momentum, orthogonalised matrix by matrix (arXiv:2502.16982).

  buf <- m buf + G;   G' = G + m buf                               (Nesterov)
  X = G' / (|G'|_F + 1e-7), in bfloat16, with rows <= columns
  5 times  A = X X^T;   X <- a X + (b A + c A A) X
  update = 0.2 sqrt(max(rows, columns)) X

so that an update has a root mean square of about 0.2, like AdamW's, and both
can use the same learning rate and weight decay.

The momentum is `optax.trace`. The orthogonalisation is ours:
`optax.contrib.muon` iterates in the float32 of the gradient, and weights
momentum and gradient with two bias corrections that differ in the first steps.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from attnres_jax.common import sharding

# Coefficients of the quintic iteration: steep at zero rather than convergent to
# one.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def scale_by_muon(
  momentum: float, iterations: int, update_rms: float
) -> optax.GradientTransformation:
  """Turns gradients of matrices into updates, before the learning rate.

  Parameters declare which of their axes form the matrix.
  """

  def directions(updates: Any, params: Any) -> Any:
    del params
    return sharding.map_parameters(
      lambda g: _direction(g.value, g.axes, iterations, update_rms), updates
    )

  return optax.chain(
    optax.trace(momentum, nesterov=True), optax.stateless(directions)
  )


def _direction(
  g: jax.Array, axes: str, iterations: int, update_rms: float
) -> jax.Array:
  matrices = as_matrices(g, axes)
  scale = update_rms * math.sqrt(max(matrices.shape[-2:]))
  return (scale * orthogonalise(matrices, iterations)).reshape(g.shape)


def as_matrices(x: jax.Array, axes: str) -> jax.Array:
  """`x` [*batch, *rows, *columns] as [*batch, R, C], by its letters.

  A projection onto N heads of width H is ONE matrix of D rows and N H columns.
  The batch axes are stacked sublayers, which `axes` does not name, and experts.

  Raises:
    ValueError: `x` has fewer axes.
  """
  *stack, rows, columns = axes.split("|")
  batch = x.ndim - len(rows) - len(columns)
  if batch < len("".join(stack)):
    raise ValueError(f"axes {axes!r} do not fit an array of shape {x.shape}")
  row_count = math.prod(x.shape[batch : batch + len(rows)])
  return x.reshape(*x.shape[:batch], row_count, -1)


def orthogonalise(matrices: jax.Array, iterations: int = 5) -> jax.Array:
  """Moves the singular values of each matrix [..., R, C] towards one.

  Loops over the leading axis (depth), so that the iteration takes the memory of
  one layer; the other axes (experts) run as a batch. Five Newton-Schulz
  iterations bring most values into 0.7 to 1.2. The result is float32.
  """
  if matrices.ndim > 2:
    return jax.lax.map(lambda m: _newton_schulz(m, iterations), matrices)
  return _newton_schulz(matrices, iterations)


def _newton_schulz(x: jax.Array, iterations: int) -> jax.Array:
  tall = x.shape[-2] > x.shape[-1]
  x = jnp.swapaxes(x, -1, -2) if tall else x
  x = x.astype(jnp.float32)
  norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
  a, b, c = COEFFICIENTS

  def step(_, x):
    gram = _matmul(x, jnp.swapaxes(x, -1, -2))
    low = gram.astype(x.dtype)
    mixed = (b * gram + c * _matmul(low, low)).astype(x.dtype)
    return (a * x.astype(jnp.float32) + _matmul(mixed, x)).astype(x.dtype)

  x = (x / (norm + EPS)).astype(jnp.bfloat16)
  x = jax.lax.fori_loop(0, iterations, step, x).astype(jnp.float32)
  return jnp.swapaxes(x, -1, -2) if tall else x


def _matmul(x: jax.Array, y: jax.Array) -> jax.Array:
  return jnp.matmul(x, y, preferred_element_type=jnp.float32)
