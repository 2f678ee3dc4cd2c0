# SPDX-License-Identifier: Apache-2.0
"""Gated Residual against its equations, stream by stream."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import analysis
from attnres_jax import config as config_lib
from attnres_jax.models import residuals
from tests.analysis import networks
from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


def _site(p, l, streams):
  """(factors of each stream in a read, weights of each stream in a write)."""
  m = len(streams)
  gain = [1 + p.gain[l, i] for i in range(m)]
  normed = [trunks.rms_norm(x, trunks.EPS) * g for x, g in zip(streams, gain)]
  low = sum(normed[i] / m @ p.down[l, i] for i in range(m))
  low = low * _sigmoid(low)
  gates = [_sigmoid(low @ p.up[l, :, i]) for i in range(m)]
  factors = [
    gate * g / np.sqrt(np.mean(x**2, -1, keepdims=True) + trunks.EPS) / m
    for gate, g, x in zip(gates, gain, streams)
  ]
  if l == len(p.weigh):
    return factors, None
  logits = sum(normed[i] / m @ p.weigh[l, i] for i in range(m))
  return factors, np.moveaxis(2 * _sigmoid(logits), -1, 0)[..., None]


def _definition(sublayers, p, embedding):
  streams = [embedding] * p.gain.shape[1]
  for l, f in enumerate(sublayers):
    factors, weights = _site(p, l, streams)
    y = f(sum(c * x for c, x in zip(factors, streams)))
    streams = [x + w * y for w, x in zip(weights, streams)]
  factors, _ = _site(p, len(sublayers), streams)
  return sum(c * x for c, x in zip(factors, streams))


@pytest.mark.parametrize("streams,rank", [(4, 0), (3, 2)])
def test_is_its_definition(streams, rank):
  trunks.check("gated_residual", _definition, streams=streams, rank=rank)


def test_zero_matrices_are_prenorm():
  """Gates and weights are then 1/2 and 1, and a gamma of 1 makes up for it."""
  layers, embedding = trunks.toy(4, pre_norm=False)
  module = trunks.scheme("gated_residual", 4, scale=0.0)
  module = jax.tree.map(jnp.zeros_like, module)
  module.gain[...] = jnp.ones_like(module.gain[...])
  found = trunks.run(layers, module, embedding, scan=False)
  h = np.asarray(embedding)
  for f in trunks.functions(layers, 4):
    h = h + f(trunks.rms_norm(h, trunks.EPS))
  expected = trunks.rms_norm(h, trunks.EPS)
  np.testing.assert_allclose(found, expected, atol=1e-12)


def test_streams_may_change_places():
  layers, embedding = trunks.toy(3, pre_norm=False)
  module = trunks.scheme("gated_residual", 3)
  found = trunks.run(layers, module, embedding, scan=False)
  order = np.array([2, 0, 3, 1])
  p = trunks.parameters(module)
  module.gain[...] = jnp.asarray(p.gain[:, order])
  module.down[...] = jnp.asarray(p.down[:, order])
  module.up[...] = jnp.asarray(p.up[:, :, order])
  module.weigh[...] = jnp.asarray(p.weigh[:, order][..., order])
  again = trunks.run(layers, module, embedding, scan=False)
  np.testing.assert_allclose(again, found, atol=1e-12)


def test_mixing_matrix():
  """Per channel, the rank is the number of streams."""
  module = trunks.scheme("gated_residual", 8, streams=3)
  values = np.random.default_rng(0).standard_normal((9, trunks.WIDTH))
  p, streams = trunks.parameters(module), [values[0]] * 3
  written = [np.ones((3, 1))]
  expected = np.zeros((9, 9, trunks.WIDTH))
  for l in range(9):
    factors, weights = _site(p, l, streams)
    for i in range(l + 1):
      expected[l, i] = sum(c * w for c, w in zip(factors, written[i]))
    if l < 8:
      written.append(weights)
      streams = [x + w * values[l + 1] for w, x in zip(weights, streams)]
  found = networks.recorded_matrix(module, values)
  np.testing.assert_allclose(found, expected.mean(axis=2), atol=1e-6)
  ranks = [
    analysis.semiseparable_rank(expected[..., d], 1e-9)
    for d in range(trunks.WIDTH)
  ]
  assert set(ranks) == {3}


def test_numbers_of_parameters_and_states():
  config = config_lib.ModelConfig(
    width=32, num_layers=3, residual=config_lib.ResidualConfig("gated_residual")
  )
  scheme = residuals.abstract_residual(config)
  d, m, r = 32, 4, 4
  count = sum(leaf.size for leaf in jax.tree.leaves(scheme))
  assert count == 6 * m * d * (2 * r + m + 1) + m * d * (2 * r + 1)
  assert not scheme.final_norm and not scheme.pre_norm
  vector = jax.ShapeDtypeStruct((1, 1, d), "float32")
  state = jax.eval_shape(type(scheme).init, scheme, vector)
  assert state.streams_BTMD.size == m * d
  assert state.low_BTR.size == r + m


def test_zero_matrices_would_stay_zero():
  """Why they start at random."""
  layers, embedding = trunks.toy(2, pre_norm=False)
  module = trunks.scheme("gated_residual", 2, scale=0.0)
  module = jax.tree.map(jnp.zeros_like, module)
  _, gradient, _ = trunks.value_and_grad(layers, module, embedding)[1]
  for matrix in (gradient.down, gradient.up):
    np.testing.assert_array_equal(matrix[...], 0.0)
  weigh = gradient.weigh[...]
  np.testing.assert_allclose(weigh, weigh[:, :1] + 0 * weigh, atol=1e-15)
  assert np.abs(weigh).max() > 1e-3
