# SPDX-License-Identifier: Apache-2.0
"""A killed command leaves no compiler behind."""

import pathlib
import subprocess
import sys
import time

import pytest

# The compiler's process stands still here, as it would compile for minutes.
PROGRAM = """
import time
from attnres_jax.plan import schedule
if __name__ == "__main__":
  schedule.up_to_schedule(time.sleep, 600)
"""


@pytest.mark.more
@pytest.mark.skipif(
  not pathlib.Path("/proc/self/task").exists(), reason="not Linux"
)
def test_the_compiler_ends_with_its_command(tmp_path):
  file = tmp_path / "program.py"
  file.write_text(PROGRAM)
  command = subprocess.Popen([sys.executable, str(file)])
  children = pathlib.Path(f"/proc/{command.pid}/task/{command.pid}/children")
  try:
    compiler = _wait(lambda: _of_jax(children.read_text().split()))
  finally:
    command.kill()
    command.wait()
  assert _wait(lambda: not (pathlib.Path("/proc") / compiler).exists())


def _of_jax(numbers):
  """The child that has imported JAX, and so runs the compiler."""
  maps = {n: pathlib.Path(f"/proc/{n}/maps").read_text() for n in numbers}
  return next((n for n, text in maps.items() if "jaxlib" in text), None)


def _wait(done, seconds=60):
  deadline = time.monotonic() + seconds
  while not (result := done()):
    assert time.monotonic() < deadline
    time.sleep(0.1)
  return result
