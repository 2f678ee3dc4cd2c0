# SPDX-License-Identifier: Apache-2.0
"""What ranks hold: published peaks, and pools against tick-by-tick replay."""

import itertools

import numpy as np
import pytest

from attnres_jax.pipeline import schedule

# Fused order: ranks, stages, chunks per block; the most blocks of any rank when
# it keeps what it receives, and also what it produces as long as needed.
LIVE = [((4, 2, 1), 26, 27), ((8, 2, 2), 54, 54), ((8, 4, 4), 63, 63)]

CASES = [
  (schedule.Layout(4, 2, 2, 2), 8),
  (schedule.Layout(4, 2, 2, 3), 12),
  (schedule.Layout(2, 3, 2, 2), 6),
  (schedule.Layout(3, 2, (1, 4, 2, 3, 1, 2), 4), 6),
  (schedule.Layout(4, 1, 4, 2), 7),
  (schedule.Layout(1, 3, 2, 2), 4),
  (schedule.Layout(4, 2, 2, 4), 8),
  (schedule.Layout(2, 2, 2, 1), 4),
  (schedule.Layout(2, 2, 2), 4),
]


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


def test_peaks_do_not_grow_with_microbatches():
  peaks = [make((4, 2, 2), 4 * n).peaks(1) for n in (3, 5, 9)]
  assert peaks[0] == peaks[1] == peaks[2]


@pytest.mark.parametrize("layout,microbatches", CASES)
def test_pool_of_blocks_serves_every_read(layout, microbatches):
  """Writes (microbatch, block) tags into slots and reads them back."""
  plan = schedule.make_schedule(layout, microbatches)
  pool = plan.slot_pool("blocks")
  live = [plan.peaks(r).blocks for r in range(layout.num_ranks)]
  assert pool.size == max(live)
  for rank in range(layout.num_ranks):
    held = {}
    for backward, chunk, m in plan.events(rank):
      slots = pool.slots[chunk]
      if not backward:
        arrived = list(layout.window(chunk, "minimum"))
        arrived += [0] if chunk == 0 and layout.block_size else []
        for block in arrived:
          held[slots[m, block]] = (m, block)
      for block in layout.reads(chunk) or range(layout.complete(chunk)):
        assert slots[m, block] >= 0
        assert held[slots[m, block]] == (m, block)
      if not backward:
        stays = chunk + layout.num_ranks < layout.num_chunks
        for block in layout.produced(chunk) if stays else ():
          if block:
            held[slots[m, block]] = (m, block)


@pytest.mark.parametrize("layout,microbatches", CASES)
def test_pool_of_gradients_sums_every_read(layout, microbatches):
  """Replays the backward of all ranks with sums of ones in pooled slots."""
  plan = schedule.make_schedule(layout, microbatches)
  pool = plan.slot_pool("gradients")
  live = [plan.peaks(r).gradients for r in range(layout.num_ranks)]
  assert pool.size == max(live)
  sums = np.zeros((layout.num_ranks, pool.size), int)
  messages = {}
  done = 0
  for tick, rank in itertools.product(
    range(plan.num_ticks), range(layout.num_ranks)
  ):
    unit = plan.at(tick, rank)[1]
    if unit is None:
      continue
    chunk, m = unit
    slots, rank_sums = pool.slots[chunk, m], sums[rank]
    for block, value in messages.pop((chunk + 1, m), {}).items():
      rank_sums[slots[block]] += value
    for block in range(layout.complete(chunk)):
      rank_sums[slots[block]] += 1
    for block in layout.produced(chunk):
      readers = layout.num_chunks - 1 - chunk + (block == 0)
      if readers:
        assert rank_sums[slots[block]] == readers
        rank_sums[slots[block]] = 0
      done += 1
    window = layout.window(chunk, "minimum")
    messages[chunk, m] = {block: rank_sums[slots[block]] for block in window}
    for block in window:
      rank_sums[slots[block]] = 0
  assert not sums.any()
  if layout.block_size:
    assert done == microbatches * (layout.num_blocks + 1)


@pytest.mark.parametrize("layout,microbatches", CASES)
def test_pool_of_inputs(layout, microbatches):
  plan = schedule.make_schedule(layout, microbatches)
  pool = plan.slot_pool("inputs")
  assert pool.slots.shape == (layout.num_chunks, microbatches)
  if all(map(layout.has_partial, range(1, layout.num_chunks))):
    # All units but those of chunk 0 have an input.
    units = [plan.peaks(r).units for r in range(layout.num_ranks)]
    assert max(units[1:], default=0) <= pool.size <= max(units)
  for rank in range(layout.num_ranks):
    busy = {}
    for backward, chunk, m in plan.events(rank):
      slot = pool.slots[chunk, m]
      assert (slot >= 0) == layout.has_partial(chunk)
      if slot < 0:
        continue
      if backward:
        assert busy.pop(slot) == (chunk, m)
      else:
        assert slot not in busy
        busy[slot] = chunk, m


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
