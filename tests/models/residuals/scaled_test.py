# SPDX-License-Identifier: Apache-2.0
"""ReZero and LayerScale against their equations."""

import dataclasses

from flax import nnx
import jax
import numpy as np
import pytest

from attnres_jax import analysis
from attnres_jax import config as config_lib
from attnres_jax.models import residuals
from tests.analysis import networks
from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")


def _definition(sublayers, p, h):
  for l, f in enumerate(sublayers):
    h = h + p.factor[l] * f(h)
  return h


@pytest.mark.parametrize("name", ["rezero", "rezero_prenorm", "layerscale"])
def test_is_its_definition(name):
  trunks.check(name, _definition)


def test_starts():
  """ReZero is the identity; LayerScale's factors depend on depth."""
  layers, embedding = trunks.toy(4, pre_norm=False)
  module = trunks.scheme("rezero", 4, scale=0.0)
  found = trunks.run(layers, module, embedding, scan=False)
  np.testing.assert_array_equal(found, embedding)
  for blocks, start in ((18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)):
    config = config_lib.ModelConfig(
      width=8,
      num_layers=blocks,
      residual=config_lib.ResidualConfig(name="layerscale"),
    )
    module = residuals.build_residual(config, rngs=nnx.Rngs(params=0))
    np.testing.assert_allclose(module.factor[...], start)


def test_unit_factors_are_prenorm():
  layers, embedding = trunks.toy(4)
  module = trunks.scheme("layerscale", 4, scale=0.0)
  module = jax.tree.map(np.ones_like, module)
  found = trunks.run(layers, module, embedding, scan=False)
  expected = trunks.prenorm(trunks.functions(layers, 4), embedding)
  np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("name", ["rezero", "layerscale"])
def test_mixing_matrix(name):
  module = trunks.scheme(name, 6)
  values = np.random.default_rng(0).standard_normal((7, trunks.WIDTH))
  factor = np.reshape(trunks.parameters(module).factor, (6, -1))
  row = np.array([1.0, *factor.mean(axis=1)])
  found = networks.recorded_matrix(module, values)
  np.testing.assert_allclose(found, np.tril(np.tile(row, (7, 1))), atol=1e-6)
  assert analysis.semiseparable_rank(found) == 1


def test_numbers_of_parameters():
  for name, count in (("rezero", 6), ("layerscale", 6 * 8)):
    config = config_lib.ModelConfig(width=8, num_layers=3)
    config = dataclasses.replace(
      config, residual=config_lib.ResidualConfig(name=name)
    )
    leaves = jax.tree.leaves(residuals.abstract_residual(config))
    assert sum(leaf.size for leaf in leaves) == count
