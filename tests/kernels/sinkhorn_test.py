# SPDX-License-Identifier: Apache-2.0
"""Doubly stochastic matrices on every backend, against the definition."""

import functools

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_kernels import dispatch
from attnres_kernels import sinkhorn
from tests import tiers

BACKENDS = ("xla", "pallas_tpu")


def draw(*shape, seed=0, size=1.0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(size * rng.standard_normal(shape), jnp.float32)


def both(implementation, logits, gradient, **options):
  """The matrices, and the gradient of the logits."""
  f = functools.partial(sinkhorn, implementation=implementation, **options)

  @jax.jit
  def run(logits, gradient):
    matrix, vjp = jax.vjp(f, logits)
    return matrix, *vjp(gradient)

  with dispatch.interpreted(pltpu.InterpretParams(detect_races=True)):
    return run(logits, gradient)


def in_float64(logits, gradient, **options):
  with jax.enable_x64(True):
    wide = (a.astype("float64") for a in (logits, gradient))
    return jax.device_get(both("reference", *wide, **options))


@pytest.mark.parametrize("implementation", BACKENDS)
@tiers.parametrize(
  "shape,iterations", [((4, 4, 3, 5), 20), ((3, 3, 1100), 2), ((1, 1, 2), 1)]
)
def test_is_its_definition(implementation, shape, iterations):
  arguments = draw(*shape), draw(*shape, seed=1)
  options = dict(iterations=iterations)
  found = both(implementation, *arguments, **options)
  for a, b in zip(found, in_float64(*arguments, **options), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=3e-6)


@tiers.parametrize("implementation", BACKENDS, first=["xla"])
def test_extreme_logits(implementation):
  """Entries down to exp(-30): gradients by logarithms stay bounded."""
  arguments = draw(4, 4, 200, size=8.0), draw(4, 4, 200, seed=1)
  found = both(implementation, *arguments)
  for a, b in zip(found, in_float64(*arguments), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-4)


@tiers.parametrize("implementation", BACKENDS, first=["xla"])
def test_survives_a_column_that_no_row_wants(implementation):
  logits = jnp.full((4, 4, 1, 1), 0.0).at[:, 1].set(-200.0)
  found, slope = both(implementation, logits, jnp.ones_like(logits))
  assert np.isfinite(found).all() and np.isfinite(slope).all()
  np.testing.assert_allclose(found.sum(0), 1, atol=1e-6)


def test_checks(any_arguments):
  with pytest.raises(ValueError, match="must be .M, M, ...., got"):
    sinkhorn(jnp.zeros((2, 3, 4)))
  with pytest.raises(ValueError, match="iterations=0 must be at least 1"):
    sinkhorn(jnp.zeros((2, 2, 4)), iterations=0)
  with pytest.raises(NotImplementedError, match="at most 8 rows, got 9"):
    sinkhorn(jnp.zeros((9, 9, 1)), implementation="pallas_tpu")
