# SPDX-License-Identifier: Apache-2.0
"""Mixing matrices against what the networks really read."""

import numpy as np

from attnres_jax import analysis
from tests import tiers
from tests.analysis import networks

# Schemes whose coefficients are numbers, and their semiseparable ranks.
CASES = [
  ("block_attnres", dict(block_size=2), 3),
  ("delta_attnres", {}, 4),
  ("prenorm", {}, 1),
  ("rescaled", {}, 1),
  ("full_attnres", {}, 4),
  ("block_attnres", dict(block_size=3), 3),
  ("full_attnres", dict(form="one_softmax"), 4),
  ("block_attnres", dict(block_size=3, form="one_softmax"), 3),
  ("denseformer", {}, 4),
  ("dwa", {}, 3),
  ("elmo", {}, 2),
  ("mudd", {}, 3),
  ("static_hyper_connections", dict(streams=2), 2),
]


# Of few shapes, so that tests share programs.
TOKEN, TOKENS = networks.tokens(1, 1), networks.tokens(3, 4)


def network(name):
  """Four sublayers, as in Fig. 9."""
  return networks.network(name, num_layers=2, block_size=2)


@tiers.parametrize("name,fields,rank", CASES, first=2)
def test_rows_recombine_the_values_into_the_reads(name, fields, rank):
  """Seven values of 16 channels: no other matrix does."""
  # One token, so that the mean over tokens is that token's own matrix.
  model = networks.network(name, **fields)
  trace = networks.trace(model, TOKEN)
  matrix = analysis.mixing_matrix(model, TOKEN, include_output=True)
  values_LD = np.stack([np.asarray(v)[0, 0] for v in trace.values])
  reads_LD = np.stack([np.asarray(h)[0, 0] for h in trace.reads])
  assert matrix.shape == (7, 7)
  size = np.abs(reads_LD).max()
  np.testing.assert_allclose(matrix @ values_LD, reads_LD, atol=2e-5 * size)
  np.testing.assert_array_equal(matrix, np.tril(matrix))
  assert analysis.semiseparable_rank(matrix) == rank


def test_is_the_mean_over_tokens():
  model = network("block_attnres")
  rows = [analysis.mixing_matrix(model, TOKENS[i : i + 1]) for i in range(3)]
  together = analysis.mixing_matrix(model, TOKENS)
  np.testing.assert_allclose(together, np.mean(rows, axis=0), atol=1e-5)
  assert np.max(np.abs(rows[0] - rows[1])) > 1e-3


def test_semiseparable_rank():
  # One stream, at any positive or negative gains.
  rng = np.random.default_rng(0)
  gains = np.tril(np.outer(rng.standard_normal(8), rng.standard_normal(8)))
  assert analysis.semiseparable_rank(gains) == 1
  assert analysis.semiseparable_rank(np.tril(np.ones((8, 8)))) == 1
  # Full AttnRes: any weights; Block AttnRes of S: columns of a block are equal.
  weights = np.tril(rng.uniform(0.1, 1, (16, 16)))
  assert analysis.semiseparable_rank(weights) == 8
  for size, rank in ((2, 6), (4, 4), (8, 3), (16, 2)):
    block = np.zeros((16, 16))
    for l in range(16):
      done = 1 + l // size * size  # values of completed blocks, and v_0
      of_block = rng.uniform(0.1, 1, 17)
      block[l, 0] = of_block[0]
      for i in range(1, done):
        block[l, i] = of_block[1 + (i - 1) // size]
      block[l, done : l + 1] = of_block[-1]
    assert analysis.semiseparable_rank(block) == rank


def test_norms_channels_and_probes():
  """A read that scales each value has one gain in every channel."""
  model = network("block_attnres")
  gain = analysis.mixing_matrix(model, TOKEN)
  for options in (
    dict(norms=True), dict(channel=3, probe=0), dict(channel=3, probe=1)
  ):  # fmt: skip
    matrix = analysis.mixing_matrix(model, TOKEN, **options)
    np.testing.assert_allclose(matrix, gain, atol=1e-6)


def test_is_the_mean_over_channels():
  model = network("highway")
  rows = [analysis.mixing_matrix(model, TOKEN, channel=c) for c in range(16)]
  together = analysis.mixing_matrix(model, TOKEN)
  np.testing.assert_allclose(together, np.mean(rows, axis=0), atol=1e-6)
  assert np.max(np.abs(rows[0] - rows[1])) > 1e-3
