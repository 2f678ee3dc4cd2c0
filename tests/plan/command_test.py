# SPDX-License-Identifier: Apache-2.0
"""The output of `python -m attnres_jax.plan`, and its exit status."""

import subprocess
import sys

import pytest

from tests import tiny_run
from tests.plan import small


@pytest.mark.needs("libtpu")
def test_what_fits():
  """Without output from libtpu."""
  fields = small.FIELDS | {"mesh.data": 4}
  done = subprocess.run(
    [
      sys.executable, "-m", "attnres_jax.plan",
      "--config=configs/lm.py:size=tiny", "--step=decode",
      "--topology=v5e:2x2",
      *(f"--config.{name}={value}" for name, value in fields.items()),
    ],
    cwd=tiny_run.ROOT, env=tiny_run.environment(), capture_output=True,
    text=True, check=False, timeout=600,
  )  # fmt: skip
  assert done.returncode == 0 and not done.stderr
  _, text = done.stdout.split("decode step on 4 TPU v5 lite")
  assert "headroom" in text
