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


def make(ranks, stages, microbatches):
  layout = schedule.Layout(ranks, stages, 2, 2)
  return schedule.make_schedule(layout, microbatches)


def test_units_follow_their_inputs_and_share_no_slot():
  for shape in SHAPES:
    plan = make(*shape)
    forward, backward = plan.forward_ticks, plan.backward_ticks
    chunks, microbatches = shape[0] * shape[1], shape[2]
    assert forward.shape == backward.shape == (chunks, microbatches)
    # A message takes a tick; the last chunk may turn around within a tick.
    assert np.all(forward[1:] > forward[:-1])
    assert np.all(backward[:-1] > backward[1:])
    assert np.all(backward[-1] >= forward[-1])
    for rank in range(shape[0]):
      for ticks in (forward, backward):
        rank_ticks = ticks[rank :: shape[0]].ravel()
        assert len(set(rank_ticks.tolist())) == rank_ticks.size
    assert forward.min() == 0


def test_published_table():
  plan = make(4, 2, 8)
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
    plan = make(ranks, stages, microbatches)
    ideal = (ranks - 1) / (stages * microbatches)
    assert plan.bubble(1, backward_time) == pytest.approx(ideal)


@pytest.mark.parametrize(
  "layout,microbatches,message",
  [
    (schedule.Layout(4, 2, 2, 2), 6, "num_microbatches: got 6"),
    (schedule.Layout(4, 2, 2, 2), 3, "num_microbatches: got 3"),
    (schedule.Layout(4, 1, 2, 2), 0, "num_microbatches: got 0"),
  ],
)
def test_bad_arguments_are_named(layout, microbatches, message):
  with pytest.raises(ValueError, match=f"^{message}"):
    schedule.make_schedule(layout, microbatches)
