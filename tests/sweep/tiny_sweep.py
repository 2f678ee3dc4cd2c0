# SPDX-License-Identifier: Apache-2.0
"""A sweep of runs small enough to be killed, as a command and as data.

python -m tests.sweep.tiny_sweep --config=FILE --workdir=DIR
"""

import contextlib
import io
import json
import pathlib
import subprocess
import sys
import tempfile

import pytest

from attnres_jax.scaling import grid
from attnres_jax.sweep import cli
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import state as state_lib
from tests import tiny_run

_FILE = """
from attnres_jax import config as c

FIELDS = {fields}

def get_config(arg=None):
  config = c.default_config()
  config.update_from_flattened_dict(FIELDS)
  config.model.width = c.parse_arg(arg, width=16).width
  return config

def sweep(add):
  for seed in {seeds}:
    add(seed=seed)
"""


def write(path, seeds=(0, 1), **fields):
  """Writes a config file with a sweep over seeds; returns its name."""
  defaults = {"model.residual.name": "prenorm"} | tiny_run.corpus(path.parent)
  fields = tiny_run.FIELDS | defaults | fields
  path.write_text(_FILE.format(fields=fields, seeds=seeds))
  return str(path)


def prepare(folder, source):
  return folder_lib.prepare(folder, grid.load(source), source)


def leave(folder, run, loss=2.5, status=state_lib.DONE):
  """The files that training would have written."""
  workdir, config = folder / run.name, folder_lib.run_config(run)
  event = {"split": "event", "step": 0}
  rows = [
    event | {"event": "start", "lost_steps": 0, "lost_seconds": 0.0,
             "devices": 1, "device_kind": "cpu", "python": "3", "jax": "0",
             "hardware": "abacus", "commit": "0123abcdef"},
    event | {"event": "compiled", "function": "train_step", "seconds": 7.0,
             "argument_bytes": 5_000, "temporary_bytes": 3_000},
    event | {"event": "ready", "seconds": 9.0},
    *({"split": "train", "step": step, "loss": loss + 1 / step,
       "step_seconds": 0.5, "data_wait_seconds": 0.1}
      for step in range(10, config.train.steps + 1, 10)),
  ]  # fmt: skip
  files = {
    "summary.json": {
      "status": "finished", "step": config.train.steps,
      "validation_loss": loss, "train_loss": loss, "step_seconds": 0.5,
    },
    "data.json": dict.fromkeys(
      ("train", "validation"), {"fingerprint": "0123456789abcdef"}
    ),
  }  # fmt: skip
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  (workdir / "metrics.jsonl").write_text(lines)
  for file, values in files.items():
    (workdir / file).write_text(json.dumps(values, indent=2) + "\n")
  state_lib.write(workdir, state_lib.State(status, attempts=1, seconds=1000.0))


def finished(parent):
  """The folder of three runs as if trained, and its config file."""
  source = write(parent / "tiny.py", seeds=(0, 1, 2))
  for run in prepare(parent / "sweep[1]", source):
    leave(parent / "sweep[1]", run)
  return parent / "sweep[1]", source


def start(workdir, source, *flags):
  """Launches the sweep in a new process."""
  with tempfile.NamedTemporaryFile(prefix="sweep_", delete=False) as output:
    process = subprocess.Popen(
      [
        sys.executable, "-m", "tests.sweep.tiny_sweep", f"--config={source}",
        f"--workdir={workdir}", *flags,
      ],
      cwd=tiny_run.ROOT, env=tiny_run.environment(), stdout=output,
      stderr=subprocess.STDOUT,
    )  # fmt: skip
  process.file = output.name
  return process


def launch(workdir, source, *flags):
  """`start` and `finish`, but the launcher is this process."""
  output = io.StringIO()
  with (
    pytest.MonkeyPatch.context() as patch,
    contextlib.redirect_stdout(output),
    contextlib.redirect_stderr(output),
  ):
    for name, value in tiny_run.environment().items():
      patch.setenv(name, value)
    arguments = [f"--config={source}", f"--workdir={workdir}", *flags]
    code = cli.main(EXPERIMENT, arguments)
  return code, output.getvalue()


def finish(process, timeout=300):
  """Waits for a launcher; returns its exit status and what it printed."""
  try:
    code = process.wait(timeout)
  finally:
    process.kill()
    process.wait()
  return code, pathlib.Path(process.file).read_text()


def workers(process, folder):
  """Process ids of all living workers, dead launchers' included."""
  pids = set()
  try:
    file = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    pids.update(int(pid) for pid in file.read_text().split())
  except OSError:
    pass  # The launcher is gone.
  for run in folder_lib.read(folder):
    pid = state(folder / run.name).get("pid")
    try:
      command = pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
      continue
    if "attnres_jax.sweep.worker" in command and run.name in command:
      pids.add(pid)
  return sorted(pids)


def state(workdir):
  file = pathlib.Path(workdir) / "state.json"
  return json.loads(file.read_text()) if file.exists() else {}


EXPERIMENT = cli.Experiment(
  program="python -m tests.sweep.tiny_sweep",
  description="A sweep for tests.",
  config="",
  workdir="",
  render=lambda folder, progress: str(folder),
)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
