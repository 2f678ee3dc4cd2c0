# SPDX-License-Identifier: Apache-2.0
"""Two processes of one run, over gloo on this machine."""

import signal

import numpy as np
import pytest

from attnres_jax import checkpoint
from tests import tiny_run

# What survives does not depend on the scheme, and this one compiles quickest.
FIELDS = {
  "model.residual.name": "prenorm",
  "train.steps": 200,
  "train.log_every": 10,
  "train.eval_every": 100,
  "train.depth_every": 0,
  "checkpoint.every_steps": 50,
}


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
  return tiny_run.corpus(tmp_path_factory.mktemp("data")) | FIELDS


def test_two_processes_equal_one_and_stop_together(fields, tmp_path):
  one, two = tmp_path / "one", tmp_path / "two"
  tiny_run.finish(tiny_run.start(one, fields, devices=2))

  # SIGTERM to the process that is not the writer stops both.
  processes = tiny_run.start_two(two, fields)
  tiny_run.wait_for_rows(two, processes)
  processes[1].send_signal(signal.SIGTERM)
  outputs = [tiny_run.finish(process, quiet=False) for process in processes]
  (stopped,) = tiny_run.events(two, "stopped")
  step = stopped["step"]
  assert 0 < step < FIELDS["train.steps"]
  assert all(f"stopped after step {step} with" in out for out in outputs)
  assert checkpoint.all_steps(two)[-1] == step

  # They go on, on a mesh that cuts what was whole on each.
  other = fields | {"mesh.data": 1, "mesh.fsdp": 2}
  for process in tiny_run.start_two(two, other):
    tiny_run.finish(process, quiet=False)
  (resume,) = tiny_run.events(two, "resume")
  assert checkpoint.load_model(two)[0].mesh.fsdp == 2
  assert resume["step"] == step and resume["processes"] == 2

  compared = {"train": ("loss", "grad_norm"), "validation": ("loss",)}
  for split, names in compared.items():
    rows = [tiny_run.rows(workdir, split) for workdir in (one, two)]
    assert sorted(rows[0]) == sorted(rows[1])
    for name in names:
      values = [[row[name] for row in run.values()] for run in rows]
      np.testing.assert_allclose(*values, rtol=1e-5)


def test_a_dead_process_ends_the_run(fields, tmp_path):
  """With one line that says so, rather than waiting for it for ever."""
  tiny_run.one_of_two_dies(tmp_path, fields)


@pytest.mark.slow
def test_checkpoint_that_only_one_process_cannot_read(fields, tmp_path):
  fields = fields | {"train.steps": 100, "train.eval_every": 0}
  for process in tiny_run.start_two(tmp_path, fields):
    tiny_run.finish(process, quiet=False)
  (tmp_path / "summary.json").unlink()
  newest = tmp_path / "checkpoints" / "100"
  for file in newest.rglob("*"):
    if file.is_file() and "/d/" in str(file):
      file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
  for process in tiny_run.start_two(tmp_path, fields):
    tiny_run.finish(process, quiet=False)
  (event,) = tiny_run.events(tmp_path, "checkpoint set aside")
  assert event["of_step"] == 100 and event["step"] == 50
