# SPDX-License-Identifier: Apache-2.0
"""Values of schedules, at every join of their phases."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.optimizer import schedules


def _config(**fields):
  fields = dict(peak_lr=2.0, final_lr_fraction=0.1) | fields
  return config_lib.OptimConfig(**fields)


def _cosine(part):
  """From 2 down to 0.2."""
  return 1.1 + 0.9 * math.cos(math.pi * part)


WSD = dict(schedule="wsd", decay_fraction=0.25)


COSINE, LINEAR = dict(schedule="cosine"), dict(schedule="linear")
CONSTANT = dict(schedule="constant")


# Step s is the s+1-th update. Peak 2, final 0.2, 100 steps.
@pytest.mark.parametrize(
  "warmup,fields,expected",
  [
    (10, CONSTANT, {0: 0.2, 4: 1.0, 9: 2, 10: 2, 99: 2}),
    (0, CONSTANT, {0: 2.0, 1: 2.0, 99: 2.0}),
    (10, COSINE, {
      0: 0.2, 4: 1.0, 9: 2.0, 10: _cosine(1 / 90), 39: _cosine(30 / 90),
      54: 1.1, 98: _cosine(89 / 90), 99: 0.2, 150: 0.2,
    }),
    (0, COSINE, {0: _cosine(1 / 100), 49: 1.1, 99: 0.2}),
    (10, LINEAR, {
      0: 0.2, 9: 2.0, 10: 1.98, 54: 1.1, 98: 0.22, 99: 0.2, 150: 0.2,
    }),
    (0, LINEAR, {0: 1.982, 49: 1.1, 99: 0.2}),
    (10, WSD, {
      0: 0.2, 4: 1.0, 9: 2.0, 10: 2.0, 74: 2.0, 75: _cosine(1 / 25),
      86: _cosine(12 / 25), 99: 0.2, 150: 0.2,
    }),
    (0, WSD | dict(decay_shape="linear"), {
      0: 2.0, 74: 2.0, 75: 2 - 1.8 / 25, 98: 0.2 + 1.8 / 25, 99: 0.2,
    }),
    (10, WSD | dict(decay_fraction=0.0), {9: 2.0, 50: 2.0, 99: 2.0, 150: 2}),
    # Warm-up straight into decay, and decay all the way.
    (75, WSD, {0: 2 / 75, 73: 148 / 75, 74: 2.0, 75: _cosine(1 / 25), 99: 0.2}),
    (0, WSD | dict(decay_fraction=1.0), {0: _cosine(0.01), 49: 1.1, 99: 0.2}),
  ],
)  # fmt: skip
def test_rate_at_its_joins(warmup, fields, expected):
  config = _config(warmup_steps=warmup, **fields)
  rate = schedules.make_schedule(config, 100)
  for step, value in expected.items():
    np.testing.assert_allclose(rate(step), value, rtol=1e-6)
    np.testing.assert_allclose(rate(jnp.int32(step)), value, rtol=1e-6)


@pytest.mark.parametrize("shape", sorted(schedules.DECAY_SHAPES))
@pytest.mark.parametrize("name", sorted(schedules.SCHEDULES))
def test_compiled_rates_stay_between_0_and_the_peak(name, shape):
  steps_S = np.arange(1100)
  for peak, warmup, steps in ((3e-3, 0, 1000), (1e-4, 7, 77), (0.7, 100, 999)):
    config = _config(
      schedule=name, peak_lr=peak, warmup_steps=warmup, decay_fraction=0.3,
      decay_shape=shape, final_lr_fraction=0.0,
    )  # fmt: skip
    rate = jax.jit(schedules.make_schedule(config, steps))
    rates = np.asarray(rate(steps_S))
    assert rates.min() >= 0 and rates.max() <= np.float32(peak)
    if name != "constant":
      np.testing.assert_allclose(rates[steps - 1 :], 0.0, atol=1e-7 * peak)


def test_balance_rate_stops_with_the_decay():
  fields = dict(balance_rate=0.5, warmup_steps=10)
  rate = schedules.make_balance_schedule(_config(**WSD, **fields), 100)
  assert [float(rate(s)) for s in (0, 74, 75, 99)] == [0.5, 0.5, 0.0, 0.0]
  cosine = _config(schedule="cosine", **fields)
  rate = schedules.make_balance_schedule(cosine, 100)
  assert [float(rate(jnp.int32(s))) for s in (0, 99)] == [0.5, 0.5]


@pytest.mark.parametrize("name", sorted(schedules.SCHEDULES))
def test_settled_steps_are_those_that_length_does_not_change(name):
  fields = dict(warmup_steps=10, decay_fraction=0.25)
  config = _config(schedule=name, **fields)

  def rates(steps):
    steps_S = jnp.arange(150)
    return np.stack(
      [
        make(config, steps)(steps_S)
        for make in (schedules.make_schedule, schedules.make_balance_schedule)
      ]
    )

  settled = schedules.settled_steps(config, 100)
  same = (rates(100) == rates(200)).all(axis=0)
  expected = dict(constant=math.inf, linear=10, cosine=10, wsd=75)
  assert settled == expected[name]
  count = min(settled, 150)
  assert same[:count].all() and not same[count:].any()
