# SPDX-License-Identifier: Apache-2.0
"""Highway gates against their equations."""

import numpy as np
import pytest

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


def test_is_its_definition():
  trunks.check("highway", _definition)


def test_start():
  p = trunks.parameters(trunks.scheme("highway", 4, scale=0.0))
  h = np.random.default_rng(0).standard_normal(trunks.WIDTH)
  np.testing.assert_allclose(_gate(p, 0, h), 1 / (1 + np.exp(2)), rtol=1e-5)
