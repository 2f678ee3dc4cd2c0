# SPDX-License-Identifier: Apache-2.0
"""Gated Residual against its equations, stream by stream."""

import numpy as np
import pytest

from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")


def _site(p, l, streams):
  """(factors of each stream in a read, weights of each stream in a write)."""
  m = len(streams)
  gain = [1 + p.gain[l, i] for i in range(m)]
  normed = [trunks.rms_norm(x, trunks.EPS) * g for x, g in zip(streams, gain)]
  low = sum(normed[i] / m @ p.down[l, i] for i in range(m))
  low = low * trunks.sigmoid(low)
  gates = [trunks.sigmoid(low @ p.up[l, :, i]) for i in range(m)]
  factors = [
    gate * g / np.sqrt(np.mean(x**2, -1, keepdims=True) + trunks.EPS) / m
    for gate, g, x in zip(gates, gain, streams)
  ]
  if l == len(p.weigh):
    return factors, None
  logits = sum(normed[i] / m @ p.weigh[l, i] for i in range(m))
  return factors, np.moveaxis(2 * trunks.sigmoid(logits), -1, 0)[..., None]


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
