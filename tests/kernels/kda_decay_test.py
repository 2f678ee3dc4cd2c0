# SPDX-License-Identifier: Apache-2.0
"""The decays of KDA's TPU kernel against sums written out one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_kernels.kda import pallas_tpu_decay as decay

SIZE = 32
exponents = jax.jit(decay.exponents)
gradient = jax.jit(decay.exponents_gradient)


def sums(g):
  """Each sum from its definition, one slice per token, float64."""
  g, found = np.float64(g), []
  for level in range(int(np.log2(SIZE))):
    rows = []
    for t in range(SIZE):
      middle = ((t >> (level + 1)) * 2 + 1) << level
      part = g[middle : t + 1] if t >= middle else g[t + 1 : middle]
      rows.append(part.sum(axis=0))
    found.append(np.stack(rows))
  found.append(np.stack([g[: t + 1].sum(axis=0) for t in range(SIZE)]))
  found.append(np.stack([g[t + 1 :].sum(axis=0) for t in range(SIZE)]))
  return found


def random(seed):
  return jnp.asarray(
    np.random.default_rng(seed).uniform(-3, 0, (SIZE, 128)), jnp.float32
  )


class TestExponents:
  def test_sums(self):
    g = random(0)
    actual, wanted = exponents(g), sums(g)
    assert len(actual) == len(wanted) == decay.num_levels(SIZE) + 2
    for a, b in zip(actual, wanted):
      np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)

  def test_a_reset_costs_no_precision_elsewhere(self):
    # A difference of sums that both contain the reset would lose 1e-3.
    g = random(1).at[13].set(-1e4)
    for a, b in zip(exponents(g), sums(g)):
      clear = b > -1e3
      assert clear.any() and (b <= 0).all()
      np.testing.assert_allclose(a[clear], b[clear], rtol=1e-6, atol=1e-6)

  def test_gradient_is_the_transpose(self):
    g = np.float64(random(2))
    dsums = [random(3 + i) for i in range(decay.num_levels(SIZE) + 2)]
    actual = gradient(dsums)
    # The sums are linear in g: their gradient is read off unit vectors.
    wanted = np.zeros_like(g)
    for t in range(SIZE):
      unit = np.zeros_like(g)
      unit[t] = 1
      wanted[t] = sum(
        (np.float64(d) * s).sum(axis=0) for d, s in zip(dsums, sums(unit))
      )
    np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)


class TestRows:
  @pytest.mark.parametrize("size", (1, 2, 4, 8, 16))
  def test_two_halves_in_one(self, size):
    early, late = np.float32(
      np.random.default_rng(7).normal(size=(2, SIZE, 128))
    )
    rows = np.arange(SIZE)
    is_late = (rows & size) != 0
    joined = jax.jit(decay.join, static_argnums=2)(early, late, size)
    np.testing.assert_array_equal(joined[is_late], late[is_late])
    np.testing.assert_array_equal(
      joined[~is_late], early[rows[~is_late] + size]
    )
    back = jax.jit(decay.unjoin, static_argnums=1)(joined, size)
    np.testing.assert_array_equal(back[is_late], early[is_late])
    chosen = jax.jit(decay.select, static_argnums=2)(early, late, size)
    np.testing.assert_array_equal(
      chosen, np.where(is_late[:, None], late, early)
    )
