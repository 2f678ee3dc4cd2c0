# SPDX-License-Identifier: Apache-2.0
"""Hyper-Connections against their equations in NumPy loops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import analysis
from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.models import residuals
from tests.analysis import networks
from tests.models import trunks

NAMES = ("static_hyper_connections", "hyper_connections")


def static(module, l, streams):
  """(alpha, beta, A) of sublayer l, for every token."""
  tokens = streams[0].shape[:2]
  return [
    np.multiply.outer(np.asarray(a[...])[l], np.ones(tokens))
    for a in (module.alpha, module.beta, module.mix)
  ]


def dynamic(module, l, streams):
  alpha, beta, mix = (a + 0j for a in static(module, l, streams))
  gain, weight, scale = (
    np.asarray(a[...])[l]
    for a in (module.gain, module.projection, module.scale)
  )
  for i, x in enumerate(streams):
    moved = np.tanh((trunks.rms_norm(x, trunks.EPS) * gain) @ weight)
    alpha[i] += scale[0] * moved[..., 0]
    beta[i] += scale[1] * moved[..., -1]
    for j in range(len(streams)):
      mix[i][j] += scale[0] * moved[..., 1 + j]
  return alpha, beta, mix


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
  "name,definition", [(NAMES[0], static), (NAMES[1], dynamic)]
)
def test_is_its_definition_with_its_gradients(name, definition):
  def hyper_connections(module, sublayers, embedding):
    coefficients = functools.partial(definition, module)
    return trunks.many_streams(sublayers, coefficients, embedding, 3)

  trunks.check_gradients(name, hyper_connections, 4, streams=3, scale=2.0)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", NAMES)
def test_starts_as_prenorm(name):
  layers, embedding = trunks.toy(5)
  module = trunks.scheme(name, 5, scale=0.0)
  found = trunks.run(layers, module, embedding, scan=False)
  expected = trunks.prenorm(trunks.functions(layers, 5), embedding)
  np.testing.assert_allclose(found, 4 * expected, rtol=1e-12)


def test_mixing_matrix():
  config = networks.network("prenorm", num_layers=3).config
  residual = config_lib.ResidualConfig(name=NAMES[0], streams=2)
  model = models.build_model(dataclasses.replace(config, residual=residual))
  rng = np.random.default_rng(7)
  model.residual = jax.tree.map(
    lambda a: a + jnp.asarray(rng.standard_normal(a.shape), a.dtype),
    model.residual,
  )
  alpha, beta, mix = (
    np.asarray(a[...]) for a in (
      model.residual.alpha, model.residual.beta, model.residual.mix,
    )
  )  # fmt: skip
  expected = np.zeros((6, 6))
  for l in range(6):
    for i in range(l + 1):
      # v_0 enters all streams, v_i where sublayer i - 1 (from 0) writes.
      row = np.ones(2) if i == 0 else beta[i - 1]
      for j in range(i, l):
        row = row @ mix[j]
      expected[l, i] = row @ alpha[l]
  found = analysis.mixing_matrix(model, networks.tokens(1, 2))
  size = np.abs(expected).max()
  np.testing.assert_allclose(found, expected, atol=1e-5 * size)
  assert analysis.semiseparable_rank(found) == 2


def test_numbers_of_parameters():
  d, m = 10, 4
  for name, count in zip(
    NAMES, (m * (m + 2), m * (m + 2) + d * (m + 2) + d + 2)
  ):
    scheme = residuals.abstract_residual(
      config_lib.ModelConfig(
        width=d,
        num_layers=2,
        num_heads=1,
        residual=config_lib.ResidualConfig(name=name),
      )
    )
    assert sum(a.size for a in jax.tree.leaves(scheme)) == 4 * count
