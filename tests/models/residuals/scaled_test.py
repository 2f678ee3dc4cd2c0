# SPDX-License-Identifier: Apache-2.0
"""ReZero and LayerScale against their equations."""

from flax import nnx
import numpy as np
import pytest

from attnres_jax.models import residuals
from tests import tiny_network
from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")


def _definition(sublayers, p, h):
  for l, f in enumerate(sublayers):
    h = h + p.factor[l] * f(h)
  return h


@pytest.mark.parametrize("name", ["rezero", "layerscale"])
def test_is_its_definition(name):
  trunks.check(name, _definition)


def test_starts():
  """ReZero is the identity; LayerScale's factors depend on depth."""
  layers, embedding = trunks.toy(4, pre_norm=False)
  module = trunks.scheme("rezero", 4, scale=0.0)
  output = trunks.run(layers, module, embedding, scan=False)
  np.testing.assert_array_equal(output, embedding)
  for blocks, start in ((18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)):
    config = tiny_network.config("layerscale", num_layers=blocks)
    module = residuals.build_residual(config, rngs=nnx.Rngs(params=0))
    np.testing.assert_allclose(module.factor[...], start)
