# SPDX-License-Identifier: Apache-2.0
"""Metrics are fetched one step late, and their times are right."""

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.train import metrics as metrics_lib
from attnres_jax.train import step_log
from tests import tiny_network
from tests import tiny_run


class _Rows(metrics_lib.Writer):
  """A list of rows, and a clock that the test moves."""

  def __init__(self):
    super().__init__()
    self.rows, self.now = [], 0.0

  def write(self, step, split, **values):
    self.rows.append({"step": step, "split": split} | values)


def _metrics(finite=True, **changes):
  return {
    "loss": 1.0,
    "z": 0.0,
    "grad_norm": 1.0,
    "grad_norm_L": np.ones(3),
    "tokens": 100.0,
    "skipped": 0,
    "finite": finite,
  } | changes


@pytest.fixture
def make():
  def make(**train):
    sink = _Rows()
    config = config_lib.RunConfig(
      model=tiny_network.config("prenorm"),
      train=config_lib.TrainConfig(**train),
    )

    def fetch(metrics):
      sink.now += 2.0  # The device takes two seconds for every step.
      return metrics

    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    clock = lambda: sink.now
    log = step_log.StepLog(config, sink, mesh, fetch=fetch, clock=clock)
    return log, sink

  return make


def test_training_loop_dispatches_before_it_fetches(tmp_path, monkeypatch):
  order = []

  class Log(step_log.StepLog):
    def __init__(self, *args, **options):
      def fetch(metrics):
        order.append("fetch")
        return jax.device_get(metrics)

      super().__init__(*args, fetch=fetch, **options)

    def add(self, *args, **options):
      order.append("dispatched")
      super().add(*args, **options)

  monkeypatch.setattr(step_log, "StepLog", Log)
  fields = tiny_run.corpus(tmp_path) | {
    "mesh.data": 1, "train.steps": 6, "train.depth_every": 0,
    "train.eval_every": 0, "checkpoint.every_steps": 0,
  }  # fmt: skip
  tiny_run.train_here(tmp_path / "run", fields)
  # Step 6 is the last: an evaluation and a save wait for it.
  assert order == ["dispatched"] + ["dispatched", "fetch"] * 5 + ["fetch"]


def test_times(make):
  log, sink = make(log_every=2)
  for step in range(1, 4):
    with log.waiting_for_data():
      sink.now += 0.5
    log.add(step, _metrics())
  log.drain()
  log.add(4, _metrics())
  log.drain()
  first, second = sink.rows
  # Waits of steps 1-3 lie before the fetch of step 2, two seconds per step.
  assert first["step"] == 2 and first["data_wait_seconds"] == 1.5 / 2
  assert first["step_seconds"] == (1.5 + 4.0) / 2
  assert first["tokens_per_second"] == 200 / 5.5
  assert second["step"] == 4 and second["step_seconds"] == 2.0
  assert first["model_flop_utilisation"] is None
  assert "finite" not in first and "grad_norm_L" not in first


def test_the_last_step_has_a_row(make):
  log, sink = make(log_every=2, steps=3)
  for step in range(1, 4):
    log.add(step, _metrics())
  log.drain()
  assert [row["step"] for row in sink.rows] == [2, 3]
  assert [row["step_seconds"] for row in sink.rows] == [2.0, 2.0]


def test_pauses_do_not_count(make):
  log, sink = make()
  log.add(1, _metrics())
  log.drain()
  with log.paused():
    sink.now += 100.0
  log.add(2, _metrics())
  log.drain()
  assert [row["step_seconds"] for row in sink.rows] == [2.0, 2.0]


@pytest.mark.parametrize("log_every", [1, 10])
@pytest.mark.parametrize(
  "changes, cause",
  [
    ({"loss": np.nan}, "loss is nan"),
    ({"grad_norm": np.inf}, "grad_norm is inf"),
    (
      {"grad_norm": np.nan, "grad_norm_L": np.array([1.0, np.nan, np.nan])},
      "grad_norm is nan, the first bad gradient is transformer block 1's",
    ),
  ],
)
def test_not_finite_names_the_metric(make, changes, cause, log_every):
  log, sink = make(log_every=log_every)
  log.add(1, _metrics())
  log.add(2, _metrics(finite=False, **changes))
  with pytest.raises(step_log.NonFiniteError) as error:
    log.add(3, _metrics())
  assert str(error.value) == f"step 2: {cause}" and error.value.step == 2
  assert sink.rows[-1]["event"] == "not finite"
