# SPDX-License-Identifier: Apache-2.0
"""The op in plain JAX, in logarithms: their gradients stay bounded."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def forward(logits_MMT: jax.Array, *, iterations: int) -> jax.Array:
  """See `api.sinkhorn`."""

  def step(log_MMT: jax.Array, _: None) -> tuple[jax.Array, None]:
    for axis in (1, 0):
      log_MMT -= _log_sum(log_MMT, axis)
    return log_MMT, None

  log_MMT, _ = jax.lax.scan(step, logits_MMT, length=iterations)
  return jnp.exp(log_MMT)


def _log_sum(log_MMT: jax.Array, axis: int) -> Any:
  """Of exponentials along an axis, which stays.

  The sum is written out: on a CPU, XLA reduces so few entries in a scalar loop,
  which is 20 times slower.
  """
  terms = jnp.split(log_MMT, log_MMT.shape[axis], axis=axis)
  top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, terms))
  return top + jnp.log(sum(jnp.exp(term - top) for term in terms))
