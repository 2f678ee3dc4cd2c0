# SPDX-License-Identifier: Apache-2.0
"""Weights in the order of products decode as others do."""

import numpy as np
import pytest

from attnres_jax.inference import engine
from attnres_jax.inference import prepared
from tests import tiny_network


@pytest.mark.more
def test_order_of_products(monkeypatch):
  """On a CPU too, if it is asked for."""
  model = tiny_network.model(mixers=("attention",), num_kv_heads=1)
  request = engine.Request([1, 2, 3], num_tokens=3)

  def run():
    runner = engine.Engine(model, slots=1, length=16)
    runner.submit(request)
    tokens = []
    while runner.busy:
      tokens += runner.step()
    return [token.logprob for token in tokens]

  expected, platforms = run(), []

  def reads_products(platform):
    platforms.append(platform)
    return True

  monkeypatch.setattr(prepared, "reads_products", reads_products)
  np.testing.assert_allclose(run(), expected, rtol=0, atol=1e-5)
  assert platforms == ["cpu"]
