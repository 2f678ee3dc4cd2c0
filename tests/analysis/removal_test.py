# SPDX-License-Identifier: Apache-2.0
"""Removed sources against networks that are computed without them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import analysis
from tests import tiers
from tests.analysis import networks
from tests.models import reference

BLOCK = 2
SIZES = {"block_attnres": BLOCK}


def _mixture(name, model, l, sources, keep_M):
  """The read of the sources that are kept; 0 if none is."""
  sources = jnp.stack(sources)
  if name == "prenorm":
    return jnp.einsum("M,MBTD->BTD", keep_M, sources)
  query_D = model.residual.queries.query[l] * model.residual.queries.gain[l]
  scores = jnp.einsum("D,MBTD->BTM", query_D, sources)
  # A sublayer that reads nothing returns zero.
  mean_square = jnp.mean(sources**2, axis=-1) + model.residual.eps
  scores /= jnp.moveaxis(jnp.sqrt(mean_square), 0, -1)
  scores = jnp.where(keep_M[None, None] > 0, scores, -jnp.inf)
  weights = jnp.nan_to_num(jax.nn.softmax(scores, axis=-1))
  return jnp.einsum("BTM,MBTD->BTD", weights, sources)


@functools.partial(jax.jit, static_argnums=0)
def _loss(name, model, tokens, row, column):
  """The loss if read `row` lacks `column`."""
  kinds, seen = model.config.sublayer_kinds, {}
  values = [model.embedding.encode(tokens[:, :-1])]
  for l in range(len(kinds) + 1):
    sources = reference.sources(values, SIZES.get(name, 1))
    removed = (row == l) & (column == jnp.arange(len(sources)))
    keep_M = jnp.where(removed, 0.0, 1.0)
    h_BTD = _mixture(name, model, l, sources, keep_M)
    if l < len(kinds):
      i = seen.setdefault(kinds[l], 0)
      seen[kinds[l]] += 1
      sublayer = jax.tree.map(lambda a, i=i: a[i], model.sublayers[kinds[l]])
      values.append(sublayer.core(sublayer.norm(h_BTD), None))
  log_p = jax.nn.log_softmax(model.embedding.decode(model.final_norm(h_BTD)))
  targets = jnp.asarray(tokens[:, 1:, None])
  return -jnp.mean(jnp.take_along_axis(log_p, targets, axis=-1))


@tiers.parametrize(
  "name", ["prenorm", "full_attnres", "block_attnres"], first=["block_attnres"]
)
def test_against_networks_without_the_source(name):
  # A larger epsilon counts where little is left of a read.
  model = networks.network(name, num_layers=2, block_size=BLOCK, norm_eps=1e-12)
  tokens = networks.tokens(2, 6)
  removal = analysis.source_removal(model, tokens)
  loss = _loss(name, model, tokens, -1, -1)
  np.testing.assert_allclose(removal.loss, loss, rtol=1e-5)
  L = model.residual.num_sublayers
  for l in range(L + 1):
    columns = len(reference.sources(np.zeros((l + 1, 1)), SIZES.get(name, 1)))
    assert np.all(np.isnan(removal.importance[l, columns:]))
    for i in range(columns):
      expected = _loss(name, model, tokens, l, i) - loss
      np.testing.assert_allclose(removal.importance[l, i], expected, atol=1e-4)
  assert np.nanmax(np.abs(removal.importance)) > 0.05


@pytest.mark.more
def test_weights_are_those_of_the_reads():
  tokens = networks.tokens(2, 6)
  model = networks.network("block_attnres", num_layers=2, block_size=BLOCK)
  removal = analysis.source_removal(model, tokens)
  assert removal.sources == ("embedding", "block 1", "block 2")
  assert removal.weights.shape == removal.importance.shape == (5, 3)
  np.testing.assert_allclose(np.nansum(removal.weights, axis=1), 1, atol=1e-6)
  np.testing.assert_array_equal(
    np.isnan(removal.weights), np.isnan(removal.importance)
  )
  weights = analysis.depth_weights(model, tokens[:, :-1])
  np.testing.assert_allclose(
    removal.weights[2], weights.attention[1], atol=1e-6
  )


@tiers.parametrize("name", ["prenorm", "mudd"], first=["mudd"])
def test_schemes_without_one_weight_per_source(name):
  """MUDD weighs each input."""
  model = networks.network(name, num_layers=2, block_size=BLOCK)
  removal = analysis.source_removal(model, networks.tokens(2, 6))
  assert removal.weights is None
  assert np.nanmax(np.abs(removal.importance)) > 0
