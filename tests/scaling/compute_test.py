# SPDX-License-Identifier: Apache-2.0
"""Three countings of one run."""

import pytest

from attnres_jax import config
from attnres_jax import flops
from attnres_jax.scaling import architecture
from attnres_jax.scaling import compute


def test_unit():
  # A petaflop per second for a day: one unit, by definition.
  token = compute.TokenFlops(matmul=1e15 / 3)
  assert compute.pflops_days(token, 86400, "6nd") == pytest.approx(1)


def test_each_counting_adds_a_part():
  token = compute.TokenFlops(matmul=100, attention=10, residual=1)
  counts = [
    compute.pflops_days(token, compute.PFLOPS_DAY, counting)
    for counting in compute.COUNTINGS
  ]
  assert counts == [300, 330, 333]
  assert set(compute.LABELS) == set(compute.COUNTINGS)


def test_of_network_by_hand():
  shape = architecture.network(
    num_layers=4, width=64, num_heads=2, expert_width=32
  )
  token = compute.of_network(
    shape, "block_attnres", 1024, active_params=1e6, block_size=4
  )
  assert token.matmul == 2e6
  # One MLA mixer; two heads; scores over 192 and values over 128 columns, two
  # FLOPs each, on average over half of the positions.
  assert token.attention == 2 * 2 * (192 + 128) * 1024 / 2
  # Sublayers 2 to 4 read b0 and a partial sum, 5 b0 and b1, 6 to 8 those and a
  # partial sum, the output b0 b1 b2: pairs; and 1 + 2 blocks, 6 partials.
  pairs, sources = 3 * 2 + 2 + 3 * 3 + 3, 3 + 6
  assert token.residual == 64 * (4 * pairs + 2 * sources)
  plain = compute.of_network(shape, "prenorm", 1024)
  assert (
    plain.matmul == 2 * architecture.active_params(shape)
    and plain.residual == 0
  )


def test_of_run_leaves_the_head_out():
  model = config.ModelConfig(
    vocab_size=1000,
    residual=config.ResidualConfig(name="full_attnres"),
  )
  parts = flops.flops_per_token(model, 256)
  token = compute.of_run(parts)
  assert token.matmul == parts.projections + parts.mlp
  total = token.matmul + token.attention + token.residual
  assert total == pytest.approx(parts.forward - parts.head)
  assert parts.head > 0 and token.residual > 0


def test_bad_arguments_are_named():
  with pytest.raises(ValueError, match="^counting: got 'all', expected one of"):
    compute.pflops_days(compute.TokenFlops(1.0), 1, "all")
