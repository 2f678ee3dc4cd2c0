# SPDX-License-Identifier: Apache-2.0
"""Sums in two parts of a narrow dtype."""

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax.common import precision


def test_two_parts_have_the_bits_of_both():
  """Also compiled: compilers may drop casts there and back."""
  rng = np.random.default_rng(0)
  x = jnp.float32(rng.standard_normal(1000) * 2.0 ** rng.integers(-9, 9, 1000))
  split = jax.jit(lambda x: precision.split(x, jnp.bfloat16))
  high, low = split(x)
  np.testing.assert_array_equal(high, x.astype(jnp.bfloat16))
  assert low.dtype == jnp.bfloat16
  far = np.abs(precision.join((high, low), jnp.float32) - x) / np.abs(x)
  assert 2.0**-19 < far.max() < 2.0**-16


def test_a_long_sum_of_narrow_terms():
  terms = jnp.bfloat16(np.random.default_rng(0).standard_normal((200, 64)))
  exact = np.float64(terms).sum(axis=0)
  zeros = jnp.zeros(64, jnp.bfloat16)
  parts, rounded = (zeros, zeros), zeros
  for term in terms:
    parts, rounded = precision.add(parts, term), rounded + term
  far = np.abs(precision.join(parts, jnp.float32) - exact).max()
  assert far < 2e-2 < 0.1 < np.abs(np.float64(rounded) - exact).max()


def test_parts_of_the_same_dtype():
  x = jnp.float32([1.25, -3])
  high, low = precision.split(x, jnp.float32)
  np.testing.assert_array_equal(high, x)
  assert not low.any()
