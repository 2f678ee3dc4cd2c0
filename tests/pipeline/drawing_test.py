# SPDX-License-Identifier: Apache-2.0
"""Drawings agree with the tables."""

from attnres_jax.pipeline import drawing
from attnres_jax.pipeline import schedule


def test_schedule_as_text():
  layout = schedule.Layout(2, 2, 2, 2)
  plan = schedule.make_schedule(layout, 2)
  assert drawing.schedule_text(plan) == (
    "tick  rank 0  rank 1\n"
    "----  ------  ---------\n"
    "0     F0.0    -\n"
    "1     F0.1    F0.0\n"
    "2     F1.0    F0.1\n"
    "3     F1.1    F1.0 B1.0\n"
    "4     B1.0    F1.1 B1.1\n"
    "5     B1.1    B0.0\n"
    "6     B0.0    B0.1\n"
    "7     B0.1    -\n"
  )


def test_transfers_as_text():
  lines = drawing.transfers_text(schedule.Layout(4, 2, 2, 4)).splitlines()
  assert lines[6].split() == "5 0 -> 1 b0 b1 b2 b1 b2 b2 yes".split()
  assert lines[-1].split() == "total 19 13 11 4".split()
