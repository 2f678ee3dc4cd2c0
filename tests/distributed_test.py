# SPDX-License-Identifier: Apache-2.0
"""Two processes of one run, over gloo on this machine."""

import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from attnres_jax.common import exits
from attnres_jax.train import checkpoint
from attnres_jax.train import claims
from tests import tiny_run

# Recovery does not depend on the scheme, and this one compiles fastest. With a
# constant learning rate, runs of any length start with the same steps.
FIELDS = {
  "model.residual.name": "prenorm",
  "optim.schedule": "wsd",
  "optim.decay_fraction": 0.0,
  "train.log_every": 5,
  "train.eval_every": 10,
  "train.depth_every": 0,
  "checkpoint.every_steps": 0,
}


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
  return tiny_run.corpus(tmp_path_factory.mktemp("data")) | FIELDS


PARTS = {"mesh.data": 1, "mesh.fsdp": 2}
WHOLE = {"mesh.data": 2}
STAGES = {"mesh.stage": 2, "mesh.data": 1, "pipeline.microbatches": 2}


@pytest.mark.more
@pytest.mark.parametrize(
  "first,then",
  [
    pytest.param(WHOLE, PARTS, id="shards"),
    pytest.param(STAGES, WHOLE, id="pipeline", marks=pytest.mark.slow),
    pytest.param(WHOLE, STAGES, id="to_pipeline", marks=pytest.mark.slow),
  ],
)
def test_two_processes_stop_and_die_together_and_equal_one(
  fields, first, then, tmp_path
):
  single, two = tmp_path / "one", tmp_path / "two"
  if STAGES in (first, then):
    fields = fields | {"model.num_layers": 2}
  endless = fields | tiny_run.ENDLESS

  # SIGTERM to the process that is not the writer stops both.
  processes = tiny_run.start_two(two, endless | first)
  tiny_run.wait_until(lambda: tiny_run.last_step(two), *processes)
  processes[1].send_signal(signal.SIGTERM)
  outputs = [
    tiny_run.finish(process, quiet=False, status=exits.Exit.STOPPED)
    for process in processes
  ]
  (stopped,) = tiny_run.events(two, "stopped")
  step = stopped["step"]
  assert step > 0
  assert all(f"stopped after step {step} with" in out for out in outputs)
  assert checkpoint.all_steps(two)[-1] == step

  # They resume on another mesh. When one is killed, the other ends with a
  # one-line error instead of waiting forever.
  last = step + 10
  tiny_run.one_of_two_dies(two, endless | then, after=last)
  (resume,) = tiny_run.events(two, "resume")
  assert resume["step"] == step and resume["processes"] == 2
  mesh = json.loads((two / "config.json").read_text())["mesh"]
  named = {n.split(".")[1]: v for n, v in then.items() if "mesh" in n}
  assert mesh | named == mesh

  # All results are those of one process with two devices.
  tiny_run.train_here(single, fields | {"train.steps": last, "mesh.data": 2})
  compared = {
    "train": ("loss", "grad_norm"),
    "validation": ("loss", "bits_per_byte"),
  }
  for split, names in compared.items():
    rows = [tiny_run.rows(workdir, split) for workdir in (single, two)]
    common = rows[0].keys() & rows[1].keys()
    # Of ten steps, one is evaluated.
    assert max(common) > step and (split != "train" or min(common) <= step)
    for name in names:
      values = [[run[at][name] for at in sorted(common)] for run in rows]
      np.testing.assert_allclose(*values, rtol=1e-5)


@pytest.mark.more
def test_all_processes_learn_that_the_folder_is_taken(fields, tmp_path):
  claim = claims.acquire(tmp_path)
  before = tiny_run.contents(tmp_path)
  for process in tiny_run.start_two(tmp_path, fields):
    process.wait(120)
    _, err = tiny_run.kill(process)
    assert process.returncode == 1, err
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and f"in use by process {os.getpid()}" in errors[0]
  assert tiny_run.contents(tmp_path) == before
  claim.release()


_MEETING = """
import sys
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from attnres_jax.common import processes
process = int(sys.argv[2])
print(processes.is_first(), processes.text_of_first("é" * 9 ** process))
print(processes.number_of_first(7 + process), processes.gather(process))
print(processes.all_hold(True), processes.is_same(sys.argv[2]))
print(processes.all_come("both"))
processes._BARRIER_SECONDS = 1.0
if process == 0:
  print(processes.all_come("one"))
"""


@pytest.mark.more
def test_what_processes_tell_each_other():
  """A process that is refused alone does not wait for ever."""
  address = tiny_run.free_address()
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", _MEETING, address, str(i)],
      stdout=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  outputs = [process.communicate(timeout=300)[0] for process in processes]
  outputs = [re.sub(r"\[Gloo\].*\n", "", output) for output in outputs]
  shared = "é\n7 [0, 1]\nTrue False\nTrue\n"
  assert outputs == [f"True {shared}False\n", f"False {shared}"]


@pytest.mark.slow
def test_checkpoint_that_only_one_process_cannot_read(fields, tmp_path):
  fields = fields | {
    "train.steps": 100,
    "train.eval_every": 0,
    "checkpoint.every_steps": 50,
  }
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
