# SPDX-License-Identifier: Apache-2.0
"""Deep Delta Learning against its equations, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.models import residuals
from attnres_jax.models.residuals import base
from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")
NAMES = ("ddl", "ddl_4", "ddl_sigmoid")


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


def _read(p, l, state):
  """Compress: [B, T, D, M] to [B, T, D]."""
  if not hasattr(p, "compress"):
    return state[..., 0]
  return sum(p.compress[l, j] * state[..., j] for j in range(state.shape[-1]))


def _definition(sublayers, p, embedding):
  channels = p.value.shape[-1]
  state = np.stack([embedding] * channels, axis=-1)
  for l, f in enumerate(sublayers):
    x = _read(p, l, state)
    c = trunks.rms_norm(x, trunks.EPS) * p.gain[l]
    u = f(c)
    after = np.zeros_like(state)
    for at in np.ndindex(u.shape[:2]):
      k = u[at] / np.sqrt(u[at] @ u[at] + 1e-5**2)
      beta = 2 * _sigmoid(p.beta[l] @ c[at] + p.beta_bias[l])
      if hasattr(p, "value_bias"):
        v = 4 * _sigmoid(x[at] @ p.value[l] + p.value_bias[l])
      else:
        v = c[at] @ p.value[l]
      erase = np.eye(len(k)) - beta * np.outer(k, k)
      after[at] = erase @ state[at] + beta * np.outer(k, v)
    state = after
  return _read(p, len(sublayers), state)


@pytest.mark.parametrize("name", NAMES)
def test_is_its_definition(name):
  trunks.check(name, _definition)


def _written(bias):
  """(k, v, X, X') of one sublayer, with beta = 2 sigmoid(bias)."""
  module = trunks.scheme("ddl_4", 1)
  module.beta[...] = jnp.zeros_like(module.beta[...])
  module.beta_bias[...] = jnp.full(1, bias, jnp.float64)
  rng = np.random.default_rng(0)
  state = rng.standard_normal((1, 1, 4, trunks.WIDTH))
  y = rng.standard_normal((1, 1, trunks.WIDTH))
  carry, slots = module.open(jnp.asarray(state), 0, 1)
  slot = jax.tree.map(lambda a: a[0], slots)
  after = module.write(carry, slot, jnp.asarray(y))
  h = np.asarray(base.before_norm(module, carry, slot))
  v = h[0, 0] @ module.value[...][0]
  k = y[0, 0] / np.linalg.norm(y)
  return k, v, state[0, 0].T, np.asarray(after)[0, 0].T


@pytest.mark.parametrize("bias", [-40.0, -0.3, 0.0, 1.0])
def test_delta_rule(bias):
  k, v, before, after = _written(bias)
  beta = 2 * _sigmoid(bias)
  # k^T X moves from its old value to v; beta = 1 overwrites it exactly.
  expected = (1 - beta) * (k @ before) + beta * v
  np.testing.assert_allclose(k @ after, expected, atol=1e-9)
  # Nothing else changes, and at beta = 0 nothing at all.
  across = np.eye(len(k)) - np.outer(k, k)
  np.testing.assert_allclose(across @ after, across @ before, atol=1e-9)
  if bias == -40.0:
    np.testing.assert_allclose(after, before, atol=1e-12)
  assert np.abs(v - k @ before).max() > 0.1


def test_starts_at_beta_1_and_as_the_mean_of_channels():
  p = trunks.parameters(trunks.scheme("ddl_4", 3, scale=0.0))
  np.testing.assert_array_equal(p.beta_bias, 0.0)
  np.testing.assert_array_equal(p.compress, 0.25)


def test_numbers_of_parameters_and_states():
  sites, d = 4, 8
  vector = jax.ShapeDtypeStruct((1, 1, d), "float32")
  for name, m, extra in (
    ("ddl", 1, 0),
    ("ddl_4", 4, (sites + 1) * 4 * d),
    ("ddl_sigmoid", 1, sites),
  ):
    config = config_lib.ModelConfig(
      width=d, num_layers=2, residual=config_lib.ResidualConfig(name=name)
    )
    scheme = residuals.abstract_residual(config)
    count = sum(leaf.size for leaf in jax.tree.leaves(scheme))
    assert count == sites * (d + d * m + d + 1) + extra
    state = jax.eval_shape(type(scheme).init, scheme, vector)
    assert sum(a.size for a in jax.tree.leaves(state)) == m * d
