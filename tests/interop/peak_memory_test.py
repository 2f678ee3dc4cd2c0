# SPDX-License-Identifier: Apache-2.0
"""A host holds little more than its devices do while it loads."""

import json
import subprocess
import sys

import pytest

from tests import tiny_run


@pytest.mark.slow
def test_peak_memory(tmp_path):
  command = [sys.executable, "-m", "tests.interop.peak_memory"]
  done = subprocess.run(
    [*command, str(tmp_path / "checkpoint"), "4"],
    cwd=tiny_run.ROOT,
    env=tiny_run.environment(),
    capture_output=True,
    text=True,
    check=True,
    timeout=400,
  )
  found = json.loads(done.stdout.splitlines()[-1])
  # A leaf has 268 MB; the allocator keeps some of what is freed.
  assert found["largest_shard"] == 33.6
  assert 0 < found["above_leaves"] < 2 * found["largest_shard"] + 20
