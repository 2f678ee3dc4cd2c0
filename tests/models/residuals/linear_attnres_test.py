# SPDX-License-Identifier: Apache-2.0
"""Linear attention over depth: the recurrence against its matrix."""

import numpy as np
import pytest

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
  values = trunks.outputs(5)
  matrix = _matrix(module, values)
  expected = np.einsum("btli,ibtd->lbtd", matrix, np.stack(values))
  found = trunks.reads(module, values)
  np.testing.assert_allclose(np.stack(found), expected, atol=1e-12)
  weights = module.depth_weights(values)
  for l, weight in enumerate(weights):
    wanted = np.moveaxis(matrix[:, :, l, : l + 1], -1, 0)
    np.testing.assert_allclose(weight, wanted, atol=1e-12)
  assert np.abs(weights[-1] - 1 / 6).max() > 0.05
