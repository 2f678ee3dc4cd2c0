# SPDX-License-Identifier: Apache-2.0
"""Hyper-Connections against their equations in NumPy loops."""

import functools

import numpy as np
import pytest

from tests import tiers
from tests.models import trunks


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
@tiers.parametrize(
  "name,definition",
  [("static_hyper_connections", static), ("hyper_connections", dynamic)],
)
def test_is_its_definition_with_its_gradients(name, definition):
  def hyper_connections(module, sublayers, embedding):
    coefficients = functools.partial(definition, module)
    return trunks.many_streams(sublayers, coefficients, embedding, 3)

  trunks.check_gradients(name, hyper_connections, 4, streams=3, scale=2.0)
