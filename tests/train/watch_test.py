# SPDX-License-Identifier: Apache-2.0
"""Traces of steps, and the collector of garbage."""

import gc

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.train import metrics
from attnres_jax.train import watch
from tests import tiny_run


@pytest.mark.more
def test_the_collector_skips_what_start_up_made():
  gc.unfreeze()  # What earlier tests have left.
  with watch.collector_frozen():
    assert gc.get_freeze_count() > 1000
  assert gc.get_freeze_count() == 0


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
