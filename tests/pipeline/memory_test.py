# SPDX-License-Identifier: Apache-2.0
"""What ranks hold: published peaks, and pools against tick-by-tick replay."""

import pytest

from attnres_jax.pipeline import memory
from attnres_jax.pipeline import schedule

# Fused order: ranks, stages, chunks per block; the most blocks of any rank when
# it keeps what it receives, and also what it produces as long as needed.
LIVE = [((4, 2, 1), 26, 27), ((8, 2, 2), 54, 54), ((8, 4, 4), 63, 63)]


def make(shape, microbatches):
  ranks, stages, chunks_per_block = shape
  layout = schedule.Layout(ranks, stages, 2, 2 * chunks_per_block)
  return schedule.make_schedule(layout, microbatches)


def test_units_of_rank_0_in_the_fused_order():
  shapes = [(4, 2), (8, 2), (8, 4), (4, 4)]
  units = [make((*s, 1), 4 * s[0]).peaks(0).units for s in shapes]
  assert units == [11, 23, 39, 19]
  assert make((6, 1, 1), 24).peaks(0).units == 2 * 6 - 1


@pytest.mark.parametrize("shape,received,also_made", LIVE)
def test_live_blocks(shape, received, also_made):
  plan = make(shape, 4 * shape[0])
  ranks = range(shape[0])
  most = [
    max(plan.peaks(rank, rule=rule).blocks for rank in ranks)
    for rule in ("cached", "minimum")
  ]
  assert most == [received, also_made]
  assert plan.slot_pool("blocks", rule="cached").size == received
  assert plan.slot_pool("blocks").size == also_made


@pytest.mark.parametrize(
  "layout,microbatches",
  [
    (schedule.Layout(4, 2, 2, 3), 12),
    (schedule.Layout(3, 2, (1, 4, 2, 3, 1, 2), 4), 6),
    (schedule.Layout(1, 3, 2, 2), 4),
    (schedule.Layout(2, 2, 2), 4),
  ],
)
def test_pools_are_as_large_as_the_most_that_a_rank_holds(layout, microbatches):
  """That no two vectors share a slot, results of pipelines say."""
  plan = schedule.make_schedule(layout, microbatches)
  ranks = range(layout.num_ranks)
  for kind, lifetimes in (
    ("blocks", memory.block_lifetimes), ("gradients", memory.gradient_lifetimes)
  ):  # fmt: skip
    most = 0
    for rank in ranks:
      events = plan.events(rank)
      lives = lifetimes(layout, events, rule="minimum")
      most = max(most, *(
        sum(life.start <= time <= life.end for life in lives)
        for time in range(len(events))
      ))  # fmt: skip
    assert plan.slot_pool(kind).size == most
    assert max(getattr(plan.peaks(rank), kind) for rank in ranks) == most


def test_peaks_do_not_grow_with_microbatches():
  peaks = [make((4, 2, 2), 4 * n).peaks(1) for n in (3, 5, 9)]
  assert peaks[0] == peaks[1] == peaks[2]


def test_naive_holds_a_copy_per_chunk():
  plan = make((4, 2, 2), 8)
  ranks = range(4)
  naive, cached, minimum = (
    [plan.peaks(rank, rule=rule).blocks for rank in ranks]
    for rule in schedule.RULES
  )
  assert sum(naive) > sum(minimum) and sum(naive) > sum(cached)


def test_one_rank_keeps_its_products_under_any_rule():
  layout = schedule.Layout(1, 3, 2, 2)
  plan = schedule.make_schedule(layout, 2)
  # F00 F10 F20 B20 F01 B10 F11 B00 ..., chunk before microbatch: at F11 there
  # are b0 of microbatch 0, and b0, b1 and the new b2 of microbatch 1.
  for rule in ("cached", "minimum"):
    assert plan.peaks(0, rule=rule).blocks == 4
