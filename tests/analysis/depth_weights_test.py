# SPDX-License-Identifier: Apache-2.0
"""Depth weights in the layout of Fig. 8."""

import jax
import numpy as np
import pytest

from attnres_jax import analysis
from attnres_jax.analysis import plots
from tests import tiers
from tests.analysis import networks

TOKENS = networks.tokens(2, 7)


@tiers.parametrize(
  "name,block_size",
  [("full_attnres", 4), ("block_attnres", 3), ("block_attnres", 4)],
  first=["block_attnres"],
)
def test_every_row_is_the_mean_over_tokens(name, block_size):
  """Weights themselves: see tests/models/paper_laws_test.py (Eq. 2-4)."""
  model = networks.network(name, block_size=block_size)
  depth = analysis.depth_weights(model, TOKENS)
  values = networks.trace(model, TOKENS).values
  weights_L = jax.jit(model.residual.depth_weights)(values)
  rows = [row for pair in zip(depth.attention, depth.mlp) for row in pair]
  entropies = np.stack([depth.attention_entropy, depth.mlp_entropy], 1).ravel()
  rows.append(depth.output)
  entropies = np.append(entropies, depth.output_entropy)
  assert len(rows) == 7
  for read, (row, entropy) in enumerate(zip(rows, entropies)):
    weights = np.float64(weights_L[read])
    count = len(weights)
    np.testing.assert_allclose(row[:count], weights.mean((1, 2)), atol=2e-5)
    assert np.all(np.isnan(row[count:]))
    np.testing.assert_allclose(
      entropy, -np.sum(weights * np.log(weights), 0).mean(), atol=2e-4
    )
    np.testing.assert_allclose(np.nansum(row), 1, atol=1e-5)


def test_columns_of_every_scheme_can_be_drawn():
  depth = analysis.depth_weights(networks.network("block_attnres"), TOKENS)
  axes, *_ = plots.depth_weights({"block_attnres": depth}).axes
  labels = [label.get_text() for label in axes.get_xticklabels()]
  assert labels == ["emb", "b1", "b2"]


@pytest.mark.parametrize("name", ["prenorm", "rescaled"])
def test_schemes_without_depth_attention_say_so(name):
  with pytest.raises(ValueError, match="mixing_matrix"):
    analysis.depth_weights(networks.network(name), TOKENS)
