# SPDX-License-Identifier: Apache-2.0
"""A run small enough to be killed many times, shared by several tests."""

import contextlib
import functools
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import exits
from attnres_jax.train import checkpoint
from attnres_jax.train import loop
from attnres_jax.train import train_state
from attnres_jax.train import watch

ROOT = pathlib.Path(__file__).parent.parent
SPEC = "configs/lm.py:size=micro,residual=block_attnres"
FIELDS = {
  "model.width": 16,
  "model.num_layers": 1,
  "model.num_heads": 2,
  "model.mlp_width": 32,
  "model.residual.num_blocks": 2,
  "data.source": "text",
  "data.max_epochs": 1e9,  # Of a few lines.
  "data.validation_fraction": 0.2,
  "data.sequence_length": 16,
  "data.batch_size": 4,
  "optim.warmup_steps": 4,
  "train.steps": 20,
  "train.eval_every": 10,
  "train.eval_batches": 2,
  "train.depth_every": 5,
  "checkpoint.every_steps": 5,
  "checkpoint.keep_last": 100,
}
# A run that only a test ends; its few files are read as often as it takes.
ENDLESS = {"train.steps": 10**6, "data.max_epochs": 1e6}


def corpus(folder):
  """Writes a few dozen small files and returns the fields that read them."""
  folder = pathlib.Path(folder) / "corpus[1]"
  folder.mkdir(exist_ok=True)
  rng = np.random.default_rng(0)
  words = ["depth", "source", "block", "query", "residual", "mixture", "\n"]
  for i in range(40):
    text = " ".join(rng.choice(words, size=60))
    (folder / f"{i:02d}.txt").write_text(text)
  return {"data.path": str(folder)}


def config(fields):
  return config_lib.load_config(str(ROOT / SPEC), given(fields))


def given(fields):
  """With the fields of this module, unless PreNorm has no blocks."""
  merged = FIELDS | fields
  if merged.get("model.residual.name") == "prenorm":
    del merged["model.residual.num_blocks"]
  return merged


def train_here(workdir, fields, **kwargs):
  return loop.train_and_evaluate(config(fields), workdir, **kwargs)


@contextlib.contextmanager
def traced_once():
  """Runs of one config on one mesh share their steps.

  Tracing them takes longer than the run itself, and so does a collection of all
  that earlier tests have left.
  """
  with pytest.MonkeyPatch.context() as patch:
    make_once = functools.cache(train_state.make_program)
    patch.setattr(train_state, "make_program", make_once)
    no_collection = lambda: contextlib.nullcontext()
    patch.setattr(watch, "collector_frozen", no_collection)
    yield


def start(workdir, fields, *flags, devices=1):
  """Starts the run as a process; `finish` or `kill` it."""
  command = [
    sys.executable, "-m", "attnres_jax.main", f"--config={SPEC}",
    f"--workdir={workdir}", *flags,
  ]  # fmt: skip
  fields = given(fields)
  command += [f"--config.{name}={value}" for name, value in fields.items()]
  # Files, not pipes: nothing reads while it runs, and a full pipe would block
  # it.
  with _output() as out, _output() as err:
    process = subprocess.Popen(
      command, cwd=ROOT, env=environment(devices), stdout=out, stderr=err
    )
    process.files = out.name, err.name
  return process


def free_address():
  """An address of this machine, with a port that nobody uses."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{s.getsockname()[1]}"


def start_two(workdir, fields):
  """Two processes of one run, a device each."""
  address = free_address()
  return [
    start(
      workdir, fields, "--distributed", f"--coordinator_address={address}",
      "--num_processes=2", f"--process_id={i}",
    )
    for i in range(2)
  ]  # fmt: skip


def wait_until(condition, *processes, seconds=400):
  """Waits until something holds, while all processes run."""
  deadline = time.monotonic() + seconds
  while not condition():
    for process in processes:
      assert process.poll() is None, kill(process)
    assert time.monotonic() < deadline, "the run makes no progress"
    time.sleep(0.001)


def last_step(workdir):
  """The last that is logged as a whole."""
  file = pathlib.Path(workdir) / "metrics.jsonl"
  text = file.read_text() if file.exists() else ""
  lines = text.rpartition("\n")[0].splitlines()
  return max((step_of(line, "train") for line in lines), default=0)


def one_of_two_dies(workdir, fields, after=0):
  """Kills a process; the other has to end with a one-line error.

  jax alone would wait 100 seconds for a missing heartbeat.
  """
  endless = fields | ENDLESS | {"checkpoint.every_steps": 0}
  processes = start_two(workdir, endless)
  wait_until(lambda: last_step(workdir) > after, *processes)
  processes[1].kill()
  try:
    status = processes[0].wait(60)
  finally:
    (_, err), _ = map(kill, processes)
  assert status == 1
  last = err.strip().splitlines()[-1]
  assert last.startswith("error: process 0 ends, since a step failed here or")
  assert last.endswith(
    "rerun the same command to resume from the last checkpoint"
  )


def finish(process, timeout=240, quiet=True, status=exits.Exit.DONE):
  """Waits for a process, which must end with a status; returns its stdout.

  A clean run says nothing on stderr; libraries may, unless `quiet`.
  """
  try:
    process.wait(timeout)
  finally:
    out, err = kill(process)
  assert process.returncode == status, (
    f"exit {process.returncode}\n{out}\n{err}"
  )
  assert not err or not quiet, err
  return out


def kill(process):
  """Ends a process if necessary; returns its stdout and stderr."""
  process.kill()
  process.wait()
  texts = [pathlib.Path(file).read_text() for file in process.files]
  return texts


def _output():
  return tempfile.NamedTemporaryFile(prefix="attnres_test_", delete=False)


def environment(devices=1):
  """Variables of a process with its own CPU devices; programs are shared."""
  cache = pathlib.Path(tempfile.gettempdir()) / f"attnres_tests_{os.getpid()}"
  return os.environ | {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": str(devices),
    "JAX_COMPILATION_CACHE_DIR": str(cache),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    # As in conftest.py.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
  }


def contents(folder):
  """{path: bytes} of all files in a folder."""
  return {
    path.relative_to(folder).as_posix(): path.read_bytes()
    for path in sorted(pathlib.Path(folder).rglob("*"))
    if path.is_file()
  }


def rows(workdir, split):
  """{step: row} of a run, times left out; fails on a step logged twice."""
  by_step = {}
  for row in _all_rows(workdir):
    if row["split"] == split:
      assert row["step"] not in by_step, f"step {row['step']} logged twice"
      by_step[row["step"]] = {
        name: value for name, value in row.items() if not _is_time(name)
      }
  return by_step


def events(workdir, name):
  return [row for row in _all_rows(workdir) if row.get("event") == name]


def step_of(line, split):
  """The step of a metrics line; 0 if it is of another split."""
  row = json.loads(line)
  return row["step"] if row["split"] == split else 0


def rewind(run, step):
  """Resets a run as if it had been killed after the save of `step`."""
  for saved in checkpoint.all_steps(run):
    if saved > step:
      shutil.rmtree(run / "checkpoints" / str(saved))
  (run / "summary.json").unlink()
  lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
  rows_left = [
    line
    for line in lines
    if (row := json.loads(line)).get("event") != "checkpoint"
    or row["step"] <= step
  ]
  (run / "metrics.jsonl").write_text("".join(rows_left))


def assert_same_run(a, b):
  """Asserts that metrics and weights are equal, bit for bit."""
  for split in ("train", "validation", "depth"):
    assert rows(a, split) == rows(b, split)
  arrays = [checkpoint.load_model(workdir)[1] for workdir in (a, b)]
  jax.tree.map(np.testing.assert_array_equal, *arrays)


def _all_rows(workdir):
  text = (pathlib.Path(workdir) / "metrics.jsonl").read_text()
  return [json.loads(line) for line in text.splitlines()]


def _is_time(name):
  return name.endswith("seconds") or name in (
      "tokens_per_second", "tokens_per_second_per_device", "goodput",
      "model_flop_utilisation",
  )  # fmt: skip
