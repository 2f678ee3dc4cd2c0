# SPDX-License-Identifier: Apache-2.0
"""Mixing matrices against what the networks really read."""

import numpy as np
import pytest

from attnres_jax import analysis
from tests.analysis import networks

CASES = [
  ("prenorm", 2),
  ("rescaled", 2),
  ("full_attnres", 2),
  ("block_attnres", 2),
  ("block_attnres", 3),
]


# Of few shapes, so that tests share programs.
TOKEN, TOKENS = networks.tokens(1, 1), networks.tokens(3, 4)


def network(name, block_size=2, **fields):
  """Four sublayers, as in Fig. 9."""
  return networks.network(name, num_layers=2, block_size=block_size, **fields)


@pytest.mark.parametrize("name,block_size", CASES)
def test_rows_recombine_the_values_into_the_reads(name, block_size):
  # One token, so that the mean over tokens is that token's own matrix.
  model = network(name, block_size)
  trace = networks.trace(model, TOKEN)
  matrix = analysis.mixing_matrix(model, TOKEN, include_output=True)
  values_LD = np.stack([np.asarray(v)[0, 0] for v in trace.values])
  reads_LD = np.stack([np.asarray(h)[0, 0] for h in trace.reads])
  assert matrix.shape == (5, 5)
  np.testing.assert_allclose(matrix @ values_LD, reads_LD, atol=2e-5)
  np.testing.assert_array_equal(matrix, np.tril(matrix))
  assert np.all(np.diag(matrix) > 0)


def test_fixed_schemes():
  plain = analysis.mixing_matrix(network("prenorm"), TOKEN)
  np.testing.assert_array_equal(plain, np.tril(np.ones((4, 4))))
  mean = analysis.mixing_matrix(network("rescaled"), TOKEN)
  expected = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]
  np.testing.assert_allclose(mean, expected, atol=1e-6)


def test_is_the_mean_over_tokens():
  model = network("block_attnres")
  rows = [analysis.mixing_matrix(model, TOKENS[i : i + 1]) for i in range(3)]
  together = analysis.mixing_matrix(model, TOKENS)
  np.testing.assert_allclose(together, np.mean(rows, axis=0), atol=1e-5)
  assert np.max(np.abs(rows[0] - rows[1])) > 1e-3


def test_full_rows_sum_to_one_and_block_columns_are_tied():
  full = analysis.mixing_matrix(network("full_attnres"), TOKENS)
  np.testing.assert_allclose(full.sum(1), 1, atol=1e-5)
  # Values 1 and 2 are one source once their block is complete.
  block = analysis.mixing_matrix(network("block_attnres"), TOKENS)
  np.testing.assert_array_equal(block[2:, 1], block[2:, 2])
  assert abs(block[3, 1] - block[3, 3]) > 1e-3
  assert block.sum(1)[-1] > 1.01


def test_two_phases_have_the_matrix_of_their_definition():
  for name in ("full_attnres", "block_attnres"):
    found = [
      analysis.mixing_matrix(network(name, form=form), TOKENS)
      for form in ("two_phase", "one_softmax")
    ]
    np.testing.assert_allclose(*found, atol=1e-6)


def test_norms_are_gains_where_a_read_scales_each_value():
  model = network("block_attnres")
  gain = analysis.mixing_matrix(model, TOKEN)
  norm = analysis.mixing_matrix(model, TOKEN, norms=True)
  np.testing.assert_allclose(norm, gain, atol=1e-6)


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


def test_one_channel_and_two_probes():
  model = network("block_attnres")
  mean = analysis.mixing_matrix(model, TOKEN)
  for probe in (0, 1):
    one = analysis.mixing_matrix(model, TOKEN, channel=3, probe=probe)
    np.testing.assert_allclose(one, mean, atol=1e-6)
