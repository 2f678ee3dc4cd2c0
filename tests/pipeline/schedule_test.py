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
        own = ticks[rank :: shape[0]].ravel()
        assert len(set(own.tolist())) == own.size
    assert forward.min() == 0


@pytest.mark.parametrize("backward_time", [1.0, 2.0, 3.5])
def test_fused_bubble_is_the_ideal_one(backward_time):
  for ranks, stages, microbatches in SHAPES:
    if microbatches % ranks:
      continue
    plan = make(ranks, stages, microbatches)
    ideal = (ranks - 1) / (stages * microbatches)
    assert plan.bubble(1, backward_time) == pytest.approx(ideal)
