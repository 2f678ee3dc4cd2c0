# SPDX-License-Identifier: Apache-2.0
"""Stalls are found and named; traces are written for the steps asked for."""

import gc

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.train import metrics
from attnres_jax.train import watch
from tests import tiny_run


class _Clock:
  now = 0.0

  def __call__(self):
    return self.now


def _watch():
  clock = _Clock()
  collector = watch.Collector(clock)
  stalls = watch.StallWatch(collector)
  for i in range(12):
    assert stalls.add(1.0 + 0.01 * (i % 3), 0.1, saving=False) is None
  return stalls, collector, clock


@pytest.mark.parametrize(
  "data_wait, collected, saving, cause",
  [
    (2.5, 0.0, True, "waiting for data"),
    (0.1, 2.2, True, "Python's collector"),
    (0.1, 0.5, True, "writing a checkpoint"),
    (0.1, 0.5, False, "unknown: the device, a link or another process"),
  ],
)
def test_the_cause_of_a_stall(data_wait, collected, saving, cause):
  stalls, collector, clock = _watch()
  collector.on_collection("start", {})
  clock.now += collected
  collector.on_collection("stop", {})
  stall = stalls.add(5.0, data_wait, saving)
  assert stall["cause"] == cause
  assert stall["median_seconds"] == pytest.approx(1.01)
  assert stall["collector_seconds"] == pytest.approx(collected)
  # The collector's time belongs to that step alone.
  assert stalls.add(5.0, 0.0, False)["collector_seconds"] == 0.0


def test_short_steps_and_first_steps_are_no_stalls():
  stalls = watch.StallWatch(watch.Collector())
  for seconds in (9.0, *[0.01] * 20, 0.4):
    assert stalls.add(seconds, 0.0, False) is None
  assert stalls.add(0.6, 0.0, False)["cause"].startswith("unknown")


@pytest.mark.more
def test_the_collector_skips_what_start_up_made():
  gc.unfreeze()  # What earlier tests have left.
  with watch.collector_frozen() as collector:
    assert gc.get_freeze_count() > 1000
    gc.collect()
    assert 0 < collector.seconds < 0.1
  assert gc.get_freeze_count() == 0
  seconds = collector.seconds
  gc.collect()
  assert collector.seconds == seconds


@pytest.mark.more
def test_a_run_writes_the_trace_of_its_steps(tmp_path):
  fields = tiny_run.corpus(tmp_path) | {
    "mesh.data": 1, "model.residual.name": "prenorm", "train.depth_every": 0,
    "train.steps": 6, "train.eval_every": 0, "train.profile_steps": (3, 4),
  }  # fmt: skip
  workdir = tmp_path / "run"
  tiny_run.train_here(workdir, fields)
  (event,) = [
    row
    for row in metrics.read_rows(workdir, "event")
    if row["event"] == "profiled"
  ]
  assert (event["step"], event["folder"]) == (4, str(workdir / "profile"))
  (trace,) = (workdir / "profile").rglob("*.xplane.pb")
  planes = jax.profiler.ProfileData.from_file(str(trace)).planes
  steps = {
    dict(event.stats).get("step_num")
    for plane in planes
    for line in plane.lines
    for event in line.events
    if event.name == "train"
  }
  assert steps == {3, 4}
  rows = metrics.read_rows(workdir, "train")
  assert all(0 < row["goodput"] <= 1 for row in rows)
  for row in rows:
    np.testing.assert_allclose(
      row["tokens_per_second_per_device"], row["tokens_per_second"]
    )


@pytest.mark.parametrize("steps", [(3,), (0, 2), (5, 4), (1, 2, 3)])
def test_bad_profile_steps(steps):
  with pytest.raises(config_lib.ConfigError, match=r"two steps, such as"):
    config_lib.TrainConfig(profile_steps=steps)
