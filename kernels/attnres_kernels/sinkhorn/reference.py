# SPDX-License-Identifier: Apache-2.0
"""The definition, for derivatives of any order."""

import jax
import jax.numpy as jnp


def forward(logits_MMT: jax.Array, *, iterations: int) -> jax.Array:
  """See `api.sinkhorn`."""
  matrix = jnp.exp(logits_MMT - jnp.max(logits_MMT, axis=(0, 1), keepdims=True))
  for _ in range(iterations):
    matrix = matrix / jnp.sum(matrix, axis=1, keepdims=True)
    matrix = matrix / jnp.sum(matrix, axis=0, keepdims=True)
  return matrix
