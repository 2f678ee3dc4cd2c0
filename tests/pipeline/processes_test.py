# SPDX-License-Identifier: Apache-2.0
"""A pipeline whose ranks are in two processes, over gloo on this machine."""

import signal

import numpy as np
import pytest

from attnres_jax.common import exits
from attnres_jax.train import checkpoint
from tests import tiny_run

# As in `tests/distributed_test.py`.
FIELDS = {
  "model.residual.name": "prenorm",
  "model.num_layers": 2,
  "train.steps": 60,
  "train.log_every": 5,
  "train.eval_every": 30,
  "train.depth_every": 0,
  "checkpoint.every_steps": 20,
}
STAGES = {"mesh.stage": 2, "mesh.data": 1, "pipeline.microbatches": 2}


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
  return tiny_run.corpus(tmp_path_factory.mktemp("data")) | FIELDS


@pytest.mark.slow
def test_ranks_stop_together_and_resume_on_another_mesh(fields, tmp_path):
  one, two = tmp_path / "one", tmp_path / "two"
  tiny_run.finish(tiny_run.start(one, fields))

  # SIGTERM to the rank that does not write stops both.
  processes = tiny_run.start_two(two, fields | STAGES)
  tiny_run.wait_for_rows(two, processes)
  processes[1].send_signal(signal.SIGTERM)
  outputs = [
    tiny_run.finish(process, quiet=False, status=exits.Exit.STOPPED)
    for process in processes
  ]
  (stopped,) = tiny_run.events(two, "stopped")
  step = stopped["step"]
  assert 0 < step < FIELDS["train.steps"]
  assert all(f"stopped after step {step} with" in out for out in outputs)
  assert checkpoint.all_steps(two)[-1] == step
  assert checkpoint.load_model(two)[0].mesh.stage == 2

  for process in tiny_run.start_two(two, fields | {"mesh.data": 2}):
    tiny_run.finish(process, quiet=False)
  (resume,) = tiny_run.events(two, "resume")
  assert checkpoint.load_model(two)[0].mesh.stage == 1
  assert resume["step"] == step and resume["processes"] == 2

  for split, name in (("train", "loss"), ("validation", "loss")):
    rows = [tiny_run.rows(workdir, split) for workdir in (one, two)]
    assert sorted(rows[0]) == sorted(rows[1])
    values = [[row[name] for row in run.values()] for run in rows]
    np.testing.assert_allclose(*values, rtol=1e-5)


@pytest.mark.slow
def test_a_dead_rank_ends_the_run(fields, tmp_path):
  tiny_run.one_of_two_dies(tmp_path, fields | STAGES)
