# SPDX-License-Identifier: Apache-2.0
"""Linear attention over depth: the recurrence against its matrix."""

import jax
import numpy as np
import pytest

from attnres_jax import analysis
from tests import tiny_network
from tests.models import trunks


def _matrix(module, values):
  """Weights [reads, values] of each token, from the definition."""
  phi = lambda x: np.where(x > 0, x + 1, np.exp(x))
  query, key = np.asarray(module.query[...]), np.asarray(module.key[...])
  count, (batch, length, _) = len(values), values[0].shape
  matrix = np.zeros((batch, length, count, count))
  for b, t, l in np.ndindex(batch, length, count):
    products = []
    for i in range(l + 1):
      v = np.asarray(values[i], np.float64)[b, t]
      k = phi(key[i] @ v / np.sqrt(np.mean(v**2) + module.eps))
      products.append(phi(query[l]) @ k)
    matrix[b, t, l, : l + 1] = np.array(products) / sum(products)
  return matrix


@pytest.mark.usefixtures("float64")
def test_the_recurrence_is_the_matrix():
  module = trunks.scheme("linear_attnres", 5, streams=3, scale=3.0)
  rng = np.random.default_rng(2)
  values = list(rng.standard_normal((6, 2, 3, trunks.WIDTH)))
  matrix = _matrix(module, values)
  expected = np.einsum("btli,ibtd->lbtd", matrix, np.stack(values))
  found = trunks.reads(module, values)
  np.testing.assert_allclose(np.stack(found), expected, atol=1e-12)
  weights = module.depth_weights(values)
  for l, weight in enumerate(weights):
    wanted = np.moveaxis(matrix[:, :, l, : l + 1], -1, 0)
    np.testing.assert_allclose(weight, wanted, atol=1e-12)
  assert np.abs(weights[-1] - 1 / 6).max() > 0.05


TOKENS = np.random.default_rng(0).integers(0, 16, (1, 1), dtype=np.int32)


def test_starts_as_prenorm_and_has_a_matrix_of_its_rank():
  fields = dict(num_layers=4, norm_eps=1e-12)
  model = tiny_network.model("linear_attnres", streams=2, **fields)
  plain = tiny_network.model("prenorm", **fields)
  run = jax.jit(lambda m: m(TOKENS))
  np.testing.assert_allclose(run(model), run(plain), atol=1e-5)

  module, rng = model.residual, np.random.default_rng(1)
  assert module.query.shape == (9, 2) and module.key.shape == (9, 2, 16)
  assert 0.5 < np.std(module.query[...]) < 1.5
  for leaf in (module.query, module.key):
    leaf[...] = rng.standard_normal(leaf.shape).astype(np.float32)
  matrix = analysis.mixing_matrix(model, TOKENS, include_output=True)
  trace = jax.jit(lambda model: model.trace(TOKENS))(model)
  expected = _matrix(module, trace.values)[0, 0]
  np.testing.assert_allclose(matrix, expected, atol=1e-4)
  assert analysis.semiseparable_rank(expected, 1e-9) == 2
