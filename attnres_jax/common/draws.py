# SPDX-License-Identifier: Apache-2.0
"""Random numbers that depend on the seed only.

JAX's defaults follow the environment (`JAX_DEFAULT_PRNG_IMPL`,
`JAX_RANDOM_SEED_OFFSET`, `JAX_THREEFRY_PARTITIONABLE`). The same seed has to
give the same weights and samples everywhere.
"""

import contextlib

import jax
import jax.numpy as jnp


def key(seed: int | jax.Array) -> jax.Array:
  """`jax.random.key` of a seed below 2**32, with its default generator."""
  seed = jnp.asarray(seed, jnp.uint32)
  words = jnp.stack([jnp.zeros_like(seed), seed])
  return jax.random.wrap_key_data(words, impl="threefry2x32")


def reproducible() -> contextlib.AbstractContextManager:
  """A context in which draws with such keys have to be traced."""
  return jax.threefry_partitionable(True)
