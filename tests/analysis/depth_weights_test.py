# SPDX-License-Identifier: Apache-2.0
"""Depth weights against the definition in float64, in the layout of Fig. 8."""

import numpy as np
import pytest

from attnres_jax import analysis
from tests.analysis import networks

TOKENS = networks.tokens(2, 7)


def _definition(model, read, sources):
  """Softmax weights [M, B, T] of one read, from Eq. 2-4 in float64."""
  queries = model.residual.queries
  w = np.asarray(queries.query[...], np.float64)[read]
  g = np.asarray(queries.gain[...], np.float64)[read]
  scores = []
  for source in sources:
    rms = np.sqrt(np.mean(source**2, axis=-1, keepdims=True) + 1e-6)
    scores.append(np.sum(w * (g * source / rms), axis=-1))
  scores = np.exp(np.stack(scores) - np.max(scores, axis=0))
  return scores / np.sum(scores, axis=0)


def _full_sources(values, read, block_size):
  del block_size
  return values[: read + 1]


def _block_sources(values, read, block_size):
  sources, blocks = [values[0]], values[1 : read + 1]
  for start in range(0, len(blocks), block_size):
    sources.append(sum(blocks[start : start + block_size]))
  return sources


CASES = [
  ("full_attnres", 4, _full_sources),
  ("block_attnres", 3, _block_sources),
  ("block_attnres", 4, _block_sources),
]


@pytest.mark.parametrize("name,block_size,sources_of", CASES)
def test_every_row_is_the_mean_of_the_definition(name, block_size, sources_of):
  model = networks.network(name, block_size=block_size)
  found = analysis.depth_weights(model, TOKENS)
  values = [
    np.asarray(v, np.float64) for v in networks.trace(model, TOKENS).values
  ]

  rows = [row for pair in zip(found.attention, found.mlp) for row in pair]
  entropies = np.stack([found.attention_entropy, found.mlp_entropy], 1).ravel()
  rows.append(found.output)
  entropies = np.append(entropies, found.output_entropy)
  assert len(rows) == 7
  for read, (row, entropy) in enumerate(zip(rows, entropies)):
    sources = sources_of(values, read, block_size)
    weights = _definition(model, read, sources)
    np.testing.assert_allclose(
      row[: len(sources)], weights.mean((1, 2)), atol=2e-5
    )
    assert np.all(np.isnan(row[len(sources) :]))
    np.testing.assert_allclose(
      entropy, -np.sum(weights * np.log(weights), 0).mean(), atol=2e-4
    )
    np.testing.assert_allclose(np.nansum(row), 1, atol=1e-5)


def test_full_layout_is_that_of_the_figure():
  found = analysis.depth_weights(networks.network("full_attnres"), TOKENS)
  # Sources 0..2l-2 of the l-th attention, 0..2l-1 of the l-th MLP.
  assert np.sum(~np.isnan(found.attention), 1).tolist() == [1, 3, 5]
  assert np.sum(~np.isnan(found.mlp), 1).tolist() == [2, 4, 6]
  assert found.attention.shape == found.mlp.shape == (3, 6)
  assert found.columns[0] == "embedding"
  assert found.columns[5] == "sublayer 5"
  assert found.output_columns[-1] == "sublayer 6"


def test_partial_block_sits_in_the_column_its_block_will_take():
  found = analysis.depth_weights(
    networks.network("block_attnres", block_size=4), TOKENS
  )
  assert np.sum(~np.isnan(found.attention), 1).tolist() == [1, 2, 2]
  assert np.sum(~np.isnan(found.mlp), 1).tolist() == [2, 2, 3]
  assert found.columns == ("embedding", "block 1", "block 2")
  assert found.output_columns == ("embedding", "block 1", "block 2")


@pytest.mark.parametrize("name", ["prenorm", "rescaled"])
def test_schemes_without_depth_attention_say_so(name):
  with pytest.raises(ValueError, match="mixing_matrix"):
    analysis.depth_weights(networks.network(name), TOKENS)
