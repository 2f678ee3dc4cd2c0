# SPDX-License-Identifier: Apache-2.0
"""A signal ends a process at once as long as there is nothing to save."""

import signal
import subprocess
import sys

import pytest

from tests import tiny_run

_PROGRAM = """
import hashlib, os, sys, threading, time
from attnres_jax import signals

def leave():
  # Not by print, which the signal may have interrupted.
  os.write(1, b"left\\n")
  os._exit(7)

with signals.StopSignal(leave) as stop:
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
assert threading.active_count() == 1 or "work" not in sys.argv
"""


@pytest.mark.parametrize(
  "kind, mode",
  [(signal.SIGTERM, "c"), (signal.SIGINT, "c"), (signal.SIGINT, "python"),
   (signal.SIGTERM, "work")],
)  # fmt: skip
def test_before_work_a_signal_ends_the_process(kind, mode):
  process = subprocess.Popen(
    [sys.executable, "-c", _PROGRAM, mode],
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
  if mode == "work":
    assert process.returncode == 0 and out == f"received {kind.name}\n"
  else:
    assert process.returncode == 7 and out == "left\n"
