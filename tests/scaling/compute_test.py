# SPDX-License-Identifier: Apache-2.0
"""Three countings of one run."""

import dataclasses

import pytest

from attnres_jax import config
from attnres_jax import flops
from attnres_jax.scaling import architecture
from attnres_jax.scaling import compute
from attnres_jax.scaling import paper


def _token(projections, mlp=0.0, attention=0.0, residual=0.0):
  """Not in any counting: the recurrence and the head."""
  return flops.FlopsPerToken(projections, attention, 7.0, mlp, 7.0, residual)


def test_unit():
  # A petaflop per second for a day: one unit, by definition.
  token = _token(1e15 / 3)
  assert compute.pflops_days(token, 86400, "6nd") == pytest.approx(1)


def test_each_counting_adds_a_part():
  token = _token(60, mlp=40, attention=10, residual=1)
  counts = [
    compute.pflops_days(token, compute.PFLOPS_DAY, counting)
    for counting in compute.COUNTINGS
  ]
  assert counts == [300, 330, 333]
  assert set(compute.LABELS) == set(compute.COUNTINGS)


def test_a_network_by_hand():
  residual = config.ResidualConfig("block_attnres", block_size=4)
  shape = architecture.network(
    num_layers=4, width=64, num_heads=2, expert_width=32
  )
  shape = dataclasses.replace(shape, residual=residual)
  token = flops.flops_per_token(shape, 1024)
  # One MLA mixer; two heads; scores over 192 and values over 128 columns, two
  # FLOPs each, on average over half of the positions.
  assert token.attention == 2 * 2 * (192 + 128) * 1024 / 2
  # Sublayers 2 to 4 read b0 and a partial sum, 5 b0 and b1, 6 to 8 those and a
  # partial sum, the output b0 b1 b2: pairs; and 1 + 2 blocks, 6 partials.
  pairs, sources = 3 * 2 + 2 + 3 * 3 + 3, 3 + 6
  assert token.residual == 64 * (4 * pairs + 2 * sources)


def test_table_2_counts_its_published_parameters():
  size = paper.TABLE_2[0]
  assert size.compute("6nd") == pytest.approx(
    6 * size.active_params * size.tokens / compute.PFLOPS_DAY
  )
  attention = flops.flops_per_token(size.model, 8192).attention
  both = size.compute("attention") - size.compute("6nd")
  assert both == pytest.approx(3 * attention * size.tokens / compute.PFLOPS_DAY)


def test_bad_arguments_are_named():
  with pytest.raises(ValueError, match="^counting: got 'all', expected one of"):
    compute.pflops_days(_token(1.0), 1, "all")
