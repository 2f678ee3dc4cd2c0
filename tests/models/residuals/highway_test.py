# SPDX-License-Identifier: Apache-2.0
"""Highway gates against their equations."""

import numpy as np
import pytest

from tests.analysis import networks
from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")


def _gate(p, l, h):
  logits = trunks.rms_norm(h, trunks.EPS) @ p.matrix[l] + p.bias[l]
  return 1 / (1 + np.exp(-logits))


def _definition(sublayers, p, h):
  for l, f in enumerate(sublayers):
    gate = _gate(p, l, h)
    h = (1 - gate) * h + gate * f(h)
  return h


@pytest.mark.parametrize("name", ["highway", "highway_scalar"])
def test_is_its_definition(name):
  trunks.check(name, _definition)


@pytest.mark.parametrize("name", ["highway", "highway_scalar"])
def test_mixing_matrix(name):
  """M[i -> l] = g_i times all (1 - g_j) of later sublayers, see section 6.2."""
  module = trunks.scheme(name, 5)
  values = np.random.default_rng(0).standard_normal((6, trunks.WIDTH))
  p, h, gates = trunks.parameters(module), values[0], []
  for l in range(5):
    gates.append(_gate(p, l, h))
    h = (1 - gates[l]) * h + gates[l] * values[l + 1]
  expected = np.zeros((6, 6))
  for l in range(6):
    for i in range(l + 1):
      kept = np.ones(trunks.WIDTH) if i == 0 else gates[i - 1]
      for j in range(i, l):
        kept = kept * (1 - gates[j])
      expected[l, i] = np.mean(kept)
  found = networks.recorded_matrix(module, values)
  np.testing.assert_allclose(found, expected, atol=1e-6)
  np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("name", ["highway", "highway_scalar"])
def test_start(name):
  start = trunks.scheme(name, 4, scale=0.0)
  values = np.random.default_rng(0).standard_normal((5, trunks.WIDTH))
  found = networks.recorded_matrix(start, values)
  assert found[1, 1] == pytest.approx(1 / (1 + np.exp(2)), rel=1e-5)
