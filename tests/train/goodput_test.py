# SPDX-License-Identifier: Apache-2.0
"""Accounting of time, on rows with known sums."""

import pytest

from attnres_jax.train import goodput

_STEP = {"split": "train", "step_seconds": 2.0, "data_wait_seconds": 0.5}
# Ten steps to a row; killed at step 33, resumed at 25 and finished at 40.
FIRST = [
  {"split": "event", "event": "start", "step": 0, "lost_steps": 0,
   "lost_seconds": 0.0},
  {"split": "event", "event": "compiled", "step": 0, "seconds": 30.0},
  {"split": "event", "event": "compiled", "step": 0, "seconds": 5.0},
  {"split": "event", "event": "ready", "step": 0, "seconds": 42.0},
  _STEP | {"step": 10},
  {"split": "validation", "step": 10, "seconds": 3.0},
  _STEP | {"step": 20},
  {"split": "depth", "step": 20, "seconds": 1.0},
  {"split": "event", "event": "checkpoint", "step": 25, "blocked_seconds": 4.0},
]  # fmt: skip
LOST = [
  _STEP | {"step": 30},
  {"split": "validation", "step": 30, "seconds": 3.0},
]
SECOND = [
  {"split": "event", "event": "resume", "step": 25, "lost_steps": 5,
   "lost_seconds": 13.0},
  {"split": "event", "event": "compiled", "step": 25, "seconds": 31.0},
  {"split": "event", "event": "ready", "step": 25, "seconds": 40.0},
  _STEP | {"step": 30, "step_seconds": 3.0},
  {"split": "validation", "step": 30, "seconds": 2.0},
  _STEP | {"step": 40},
]  # fmt: skip


def test_two_attempts():
  spent = goodput.of_rows(FIRST + SECOND)
  assert spent == goodput.Goodput(
    startup=(42 - 35) + (40 - 31),
    compile=30 + 5 + 31,
    step=10 * (1.5 + 1.5 + 2.5 + 1.5),
    data_wait=40 * 0.5,
    checkpoint_wait=4,
    evaluation=3 + 1 + 2,
    lost=13,
    lost_steps=5,
    chip_seconds=16 + 66 + 70 + 20 + 4 + 6 + 13,
  )
  assert spent.total == pytest.approx(16 + 66 + 70 + 20 + 4 + 6 + 13)
  assert "lost_steps" not in spent.seconds


def test_chip_hours_count_the_chips_of_each_attempt():
  first = [FIRST[0] | dict(devices=16, device_kind="TPU v5"), *FIRST[1:]]
  second = [SECOND[0] | dict(devices=8, device_kind="TPU v3"), *SECOND[1:]]
  # Two devices of a v3 share a chip; what is lost was the first attempt's.
  held = 42 + 20 * 2 + 3 + 1 + 4, 40 + 20 * 2.5 + 2
  spent = goodput.of_rows(first + second)
  assert spent.chip_seconds == (held[0] + 13) * 16 + held[1] * 4
  assert spent.chip_hours == spent.chip_seconds / 3600


def test_what_a_kill_undoes():
  # Five of the ten steps of row 30, and its evaluation.
  assert goodput.lost(FIRST + LOST, 25) == (5, 5 * 2.0 + 3.0)
  assert goodput.lost(FIRST + LOST, 10) == (20, 20 * 2.0 + 3.0 + 1.0)
  assert goodput.lost(FIRST + LOST, 30) == (0, 0.0)
  assert goodput.lost([], 0) == (0, 0.0)
  # If more was saved than logged, nothing is lost.
  assert goodput.lost(FIRST, 33) == (0, 0.0)


def test_an_attempt_that_was_killed_while_it_compiled():
  cut = FIRST[:2]
  spent = goodput.of_rows(cut + SECOND[:3])
  assert spent.compile == 30 + 31
  assert spent.startup == 40 - 31, "the first attempt was never ready"
