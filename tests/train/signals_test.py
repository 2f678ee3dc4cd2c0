# SPDX-License-Identifier: Apache-2.0
"""Signals and closed outputs: a process saves, or ends at once, or continues.

A signal ends a process at once as long as there is nothing to save.
"""

import os
import signal
import subprocess
import sys

import jax
from jax.experimental import multihost_utils
import pytest

from attnres_jax.train import signals
from tests import tiers
from tests import tiny_run

_PROGRAM = """
import hashlib, os, sys, time
from attnres_jax.train import signals

with signals.StopSignal() as stop:
  if "work" in sys.argv:
    stop.begin_work()
  print("ready", flush=True)
  if "c" in sys.argv:
    # One long call into C, during which Python runs no handlers, like a
    # compiler: half a minute.
    hashlib.pbkdf2_hmac("sha256", b"", b"", 50_000_000)
  else:
    time.sleep(0.5)
  print("received", stop.received, flush=True)
"""


def _signalled(program, kind, mode):
  """The status and the output of a program that gets a signal."""
  process = subprocess.Popen(
    [sys.executable, "-c", program, mode],
    stdout=subprocess.PIPE,
    text=True,
    env=tiny_run.environment(),
  )
  try:
    assert process.stdout.readline() == "ready\n"
    process.send_signal(kind)
    out, _ = process.communicate(timeout=10)
  finally:
    process.kill()
  return process.returncode, out


@tiers.parametrize(
  "kind, mode",
  # One table has them all.
  [(signal.SIGTERM, "c"), (signal.SIGINT, "c"), (signal.SIGINT, "python"),
   (signal.SIGHUP, "work"), (signal.SIGUSR1, "work")],
)  # fmt: skip
def test_before_work_a_signal_ends_the_process(kind, mode):
  actual = _signalled(_PROGRAM, kind, mode)
  stopped = 0, f"received {kind.name}\n"
  assert actual == (stopped if mode == "work" else (-kind, ""))


def test_what_nohup_ignores_stays_ignored():
  program = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
  actual = _signalled(program + _PROGRAM, signal.SIGHUP, "work")
  assert actual == (0, "received None\n")


@pytest.mark.parametrize("first", [0, 1, 300])
@pytest.mark.parametrize("calls", [0, 1, 7])
def test_several_processes_stop_wherever_a_run_begins(
  monkeypatch, first, calls
):
  """A signal between two calls, or before all of them."""
  told, agreed = [0], []

  def reached(number):
    # As XLA's PreemptionSyncManager: one number, and no other.
    told.append(number)
    return number in agreed

  monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
  name = "reached_preemption_sync_point"
  monkeypatch.setattr(multihost_utils, name, reached)
  stop, steps = signals.StopSignal(), iter(range(first, first + 9))
  assert not any(stop.requested(next(steps)) for _ in range(calls))
  agreed.append(told[-1] + 1)
  # A new process is told of 0 first, so it takes one step.
  assert stop.requested(next(steps)) or stop.requested(next(steps))


# Writes more than any buffer has, then says on another file that it has ended.
_TALKER = """
import os, sys
from attnres_jax.train import signals
signals.outlive_outputs()
for i in range(100):
  print("x" * 2000)
  print("\u00e9", file=sys.stderr, flush=True)
with open(sys.argv[1], "w") as file:
  file.write("finished")
sys.exit(3)
"""


@tiers.parametrize("way", ["reader ends", "closed", "full"], first=["closed"])
def test_a_process_outlives_its_outputs(way, tmp_path):
  end = tmp_path / "end"
  argv = [sys.executable, "-c", _TALKER, str(end)]
  environment = tiny_run.environment() | {"PYTHONIOENCODING": "ascii"}
  if way == "reader ends":
    read, write = os.pipe()
    process = subprocess.Popen(
      argv, stdout=write, stderr=write, env=environment
    )
    os.close(write)
    os.read(read, 1)
    os.close(read)
  elif way == "closed":
    shell = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *argv]
    process = subprocess.Popen(shell, env=environment)
  else:
    with open("/dev/full", "w") as full:
      process = subprocess.Popen(
        argv, stdout=full, stderr=full, env=environment
      )
  assert process.wait(60) == 3
  assert end.read_text() == "finished"
