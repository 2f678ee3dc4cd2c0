# SPDX-License-Identifier: Apache-2.0
"""Orders against their closed forms, and units that run freely."""

import itertools

import numpy as np
import pytest

from attnres_jax.pipeline import schedule
from experiments.pipeline_cost import orders

SHAPES = [
  (ranks, stages, groups * ranks)
  for ranks, stages, groups in itertools.product(
    (1, 2, 3, 4, 8), (1, 2, 3, 4), (1, 2, 3, 5)
  )
] + [(4, 1, 6), (4, 1, 1), (3, 1, 2), (8, 1, 5)]

# Megatron's order: units and microbatches in flight on ranks 0, 1, ...
PEAKS = [
  ((4, 2, 2), {0: (11, 8), 1: (9, 8), 2: (7, 7), 3: (5, 5)}),
  ((8, 4, 4), {0: (39, 16), 7: (25, 16)}),
  ((4, 1, 1), {0: (4, 4), 1: (3, 3), 2: (2, 2), 3: (1, 1)}),
]


def make(order, ranks, stages, microbatches, chunks_per_block=1):
  layout = schedule.Layout(ranks, stages, 2, 2 * chunks_per_block)
  return orders.ORDERS[order](layout, microbatches)


@pytest.mark.parametrize("order", orders.ORDERS)
def test_running_freely_is_never_slower_nor_better_than_ideal(order):
  for ranks, stages, microbatches in SHAPES[::3]:
    plan = make(order, ranks, stages, microbatches)
    free = orders.free_time(plan, 1, 2)
    assert free <= plan.total_time(1, 2) + 1e-9
    # The last rank waits for P - 1 forwards before it starts, and P - 1
    # backwards follow its last one.
    assert free >= 3 * (microbatches * stages + ranks - 1) - 1e-9


def test_plain_1f1b_closed_form():
  for ranks, microbatches in [(1, 3), (2, 4), (4, 6), (4, 2), (5, 13)]:
    plan = make("1f1b", ranks, 1, microbatches)
    for r, m in itertools.product(range(ranks), range(microbatches)):
      warm = m < ranks - r
      assert plan.forward_ticks[r, m] == (r + m if warm else 2 * m + r)
      assert plan.backward_ticks[r, m] == 2 * m + 2 * ranks - 1 - r
    assert plan.num_ticks == 2 * (microbatches + ranks - 1)


def test_1f1b_reaches_the_ideal_bubble_running_freely():
  for ranks, stages, microbatches in SHAPES:
    if microbatches % ranks or stages > 1 and microbatches == ranks:
      continue
    plan = make("1f1b", ranks, stages, microbatches)
    total = 2 * (microbatches * stages + ranks - 1)
    assert orders.free_time(plan, 1, 1) == total == plan.num_ticks


def test_gpipe_mirrors_its_forward():
  plan = make("gpipe", 3, 2, 6)
  last = plan.forward_ticks.max()
  assert plan.backward_ticks.min() == last + 1
  assert np.array_equal(
    plan.backward_ticks + plan.forward_ticks, np.full((6, 6), 2 * last + 1)
  )
  # Every microbatch is in flight at the end of the forwards.
  assert plan.peaks(0).units == 12


@pytest.mark.parametrize("shape,expected", PEAKS)
@pytest.mark.parametrize("groups", [4, 6])
def test_published_peaks(shape, expected, groups):
  ranks, stages, chunks_per_block = shape
  plan = make("1f1b", ranks, stages, groups * ranks, chunks_per_block)
  for rank, (units, microbatches) in expected.items():
    peaks = plan.peaks(rank)
    assert (peaks.units, peaks.microbatches) == (units, microbatches)


@pytest.mark.parametrize("order", ["1f1b", "fused"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_units_in_flight(order, ranks, stages):
  plan = make(order, ranks, stages, 4 * ranks)
  for rank in range(ranks):
    warmup = orders.warmup_units(plan.layout, 4 * ranks, rank)
    peaks = plan.peaks(rank)
    if order == "fused" and stages == 1:
      assert peaks.units == 2 * (ranks - 1 - rank) + 1
    else:
      assert peaks.units == warmup + 1
    assert peaks.microbatches <= min(2 * ranks, peaks.units)


def test_the_command_draws_any_order(capsys):
  orders.main(["--order=1f1b", "--stage=2", "--show=schedule"])
  assert capsys.readouterr().out.startswith("tick  rank 0  rank 1\n")
  with pytest.raises(SystemExit):
    orders.main(["--order=zb"])
  assert "invalid choice: 'zb'" in capsys.readouterr().err
