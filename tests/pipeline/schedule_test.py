# SPDX-License-Identifier: Apache-2.0
"""Dependencies, phases, bubbles and the published table of the schedules."""

import itertools

import numpy as np
import pytest

from attnres_jax.pipeline import schedule

SHAPES = [
  (ranks, stages, groups * ranks)
  for ranks, stages, groups in itertools.product(
    (1, 2, 3, 4, 8), (1, 2, 3, 4), (1, 2, 3, 5)
  )
] + [(4, 1, 6), (4, 1, 1), (3, 1, 2), (8, 1, 5)]

# P = 4, V = 2: what each rank does at a tick, as stage.microbatch.
PUBLISHED = {
  0: ("F0.0", "", "", ""),
  3: ("F0.3", "F0.2", "F0.1", "F0.0"),
  4: ("F1.0", "F0.3", "F0.2", "F0.1"),
  7: ("F1.3", "F1.2", "F1.1", "F1.0 B1.0"),
  8: ("F0.4", "F1.3", "F1.2 B1.0", "F1.1 B1.1"),
  10: ("F0.6 B1.0", "F0.5 B1.1", "F0.4 B1.2", "F1.3 B1.3"),
  11: ("F0.7 B1.1", "F0.6 B1.2", "F0.5 B1.3", "F0.4 B0.0"),
  14: ("F1.6 B0.0", "F1.5 B0.1", "F1.4 B0.2", "F0.7 B0.3"),
}


def make(order, ranks, stages, microbatches, block=2):
  layout = schedule.Layout(ranks, stages, 2, block)
  return schedule.make_schedule(order, layout, microbatches)


@pytest.mark.parametrize("order", schedule.ORDERS)
def test_units_follow_their_inputs_and_share_no_slot(order):
  for shape in SHAPES:
    plan = make(order, *shape)
    forward, backward = plan.forward_ticks, plan.backward_ticks
    chunks, microbatches = shape[0] * shape[1], shape[2]
    assert forward.shape == backward.shape == (chunks, microbatches)
    # A message takes a tick; the last chunk may turn round within one.
    assert np.all(forward[1:] > forward[:-1])
    assert np.all(backward[:-1] > backward[1:])
    assert np.all(backward[-1] >= forward[-1])
    for rank in range(shape[0]):
      for ticks in (forward, backward):
        own = ticks[rank :: shape[0]].ravel()
        assert len(set(own.tolist())) == own.size
    assert forward.min() == 0


def test_fused_ticks_are_the_closed_form_and_hop_by_one():
  for ranks, stages, microbatches in SHAPES:
    plan = make("fused", ranks, stages, microbatches)
    chunks = ranks * stages
    for r, v, m in itertools.product(
      range(ranks), range(stages), range(microbatches)
    ):
      g, i = divmod(m, ranks)
      c = v * ranks + r
      assert plan.forward_ticks[c, m] == g * chunks + v * ranks + i + r
      assert plan.backward_ticks[c, m] == (
        chunks - 1 + g * chunks + (stages - 1 - v) * ranks + i + ranks - 1 - r
      )
    assert np.all(np.diff(plan.forward_ticks, axis=0) == 1)
    assert np.all(np.diff(plan.backward_ticks, axis=0) == -1)
    assert np.all(plan.backward_ticks[-1] == plan.forward_ticks[-1])
    if microbatches % ranks == 0:
      assert plan.num_ticks == microbatches * stages + chunks + ranks - 2
      phases = plan.phases
      units = microbatches * stages
      assert list(map(len, phases)) == [
        chunks - 1, units + ranks - chunks, chunks - 1,
      ]  # fmt: skip


def test_fused_slots_by_arithmetic_are_the_table():
  for ranks, stages, microbatches in SHAPES:
    plan = make("fused", ranks, stages, microbatches)
    for tick, rank in itertools.product(range(plan.num_ticks), range(ranks)):
      slots = (
        schedule.fused_forward_slot(tick, rank, ranks, stages),
        schedule.fused_backward_slot(tick, rank, ranks, stages),
      )
      for unit, (stage, m) in zip(plan.at(tick, rank), slots):
        if 0 <= m < microbatches:
          assert unit == (stage * ranks + rank, m)
        else:
          assert unit is None


def test_published_table():
  plan = make("fused", 4, 2, 8)
  for tick, cells in PUBLISHED.items():
    for rank, cell in enumerate(cells):
      units = plan.at(tick, rank)
      names = [
        f"{letter}{unit.chunk // 4}.{unit.microbatch}"
        for letter, unit in zip("FB", units)
        if unit is not None
      ]
      assert " ".join(names) == cell, (tick, rank)
  assert plan.num_ticks == 8 * 2 + 8 + 2


@pytest.mark.parametrize("backward_time", [1.0, 2.0, 3.5])
def test_fused_bubble_is_the_ideal_one(backward_time):
  for ranks, stages, microbatches in SHAPES:
    if microbatches % ranks:
      continue
    plan = make("fused", ranks, stages, microbatches)
    total = (microbatches * stages + ranks - 1) * (1 + backward_time)
    assert plan.total_time(1, backward_time) == pytest.approx(total)
    ideal = (ranks - 1) / (stages * microbatches)
    assert plan.bubble(1, backward_time) == pytest.approx(ideal)


@pytest.mark.parametrize("order", schedule.ORDERS)
def test_running_freely_is_never_slower_nor_better_than_ideal(order):
  for ranks, stages, microbatches in SHAPES[::3]:
    plan = make(order, ranks, stages, microbatches)
    free = plan.total_time(1, 2, lockstep=False)
    assert free <= plan.total_time(1, 2) + 1e-9
    # The last rank waits for P - 1 forwards before it starts, and P - 1
    # backwards follow its last one.
    assert free >= 3 * (microbatches * stages + ranks - 1) - 1e-9
    starts = plan.start_times(1, 2, lockstep=False)
    assert len(starts) == 2 * ranks * stages * microbatches


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
    assert plan.total_time(lockstep=False) == total == plan.num_ticks


def test_gpipe_mirrors_its_forward():
  plan = make("gpipe", 3, 2, 6)
  last = plan.forward_ticks.max()
  assert plan.backward_ticks.min() == last + 1
  assert np.array_equal(
    plan.backward_ticks + plan.forward_ticks, np.full((6, 6), 2 * last + 1)
  )
  assert not plan.phases.steady
  # Every microbatch is in flight at the end of the forwards.
  assert plan.peaks(0).units == 12


@pytest.mark.parametrize(
  "order,layout,microbatches,message",
  [
    (
      "fused",
      schedule.Layout(4, 2, 2, 2),
      6,
      "num_microbatches: got 6, expected a multiple of num_ranks=4, such as"
      " 4 or 8, with num_virtual_stages=2$",
    ),
    (
      "1f1b",
      schedule.Layout(4, 2, 2, 2),
      3,
      "num_microbatches: got 3, expected a multiple of num_ranks=4, such as 4,",
    ),
    (
      "gpipe",
      schedule.Layout(4, 1, 2, 2),
      0,
      "num_microbatches: got 0, expected a whole number of at least 1",
    ),
    (
      "zero_bubble",
      schedule.Layout(4, 1, 2, 2),
      4,
      "order: got 'zero_bubble', expected one of fused, 1f1b, gpipe",
    ),
  ],
)
def test_bad_arguments_are_named(order, layout, microbatches, message):
  with pytest.raises(ValueError, match=f"^{message}"):
    schedule.make_schedule(order, layout, microbatches)
