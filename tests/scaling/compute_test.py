# SPDX-License-Identifier: Apache-2.0
"""Three countings of one run."""

import pytest

from attnres_jax import flops
from attnres_jax.scaling import compute


def _token(projections, mlp=0.0, attention=0.0, residual=0.0):
  """Not in any counting: the recurrence and the head."""
  return flops.FlopsPerToken(projections, attention, 7.0, mlp, 7.0, residual)


def test_each_counting_adds_a_part():
  token = _token(60, mlp=40, attention=10, residual=1)
  counts = [
    compute.pflops_days(token, compute.PFLOPS_DAY, counting)
    for counting in compute.COUNTINGS
  ]
  assert counts == [300, 330, 333]
  assert set(compute.LABELS) == set(compute.COUNTINGS)


def test_bad_arguments_are_named():
  with pytest.raises(ValueError, match="^counting: got 'all', expected one of"):
    compute.pflops_days(_token(1.0), 1, "all")
