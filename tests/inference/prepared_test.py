# SPDX-License-Identifier: Apache-2.0
"""Weights in the order of products decode as others do."""

import jax
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


def test_which_weights():
  """In weights of several heads, the axis of heads follows the layers."""
  model = tiny_network.model(mixers=("attention",))
  formats = prepared.formats(model)
  orders = {
    jax.tree_util.keystr(path, simple=True, separator="/"): (
      getattr(getattr(leaf, "layout", None), "major_to_minor", None)
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(formats)
  }
  weights = {name.split("/core/")[1] for name, o in orders.items() if o}
  assert {name.split("/")[0] for name in weights} == {"query", "key", "value"}
  assert {order for order in orders.values() if order} == {(0, 2, 1, 3)}
