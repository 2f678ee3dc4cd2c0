# SPDX-License-Identifier: Apache-2.0
"""The output of `python -m attnres_jax.plan`, and its exit status."""

import subprocess
import sys

import pytest

from tests import tiny_run

pytestmark = pytest.mark.needs("libtpu")

FIELDS = {
  "model.vocab_size": 260,
  "model.num_layers": 1,
  "model.residual.num_blocks": 2,
  "data.batch_size": 4,
  "mesh.data": 4,
}


def _run(*flags, topology="v5e:2x2", **fields):
  fields = FIELDS | fields
  command = [
    sys.executable, "-m", "attnres_jax.plan",
    "--config=configs/lm.py:size=tiny",
    "--step=decode", f"--topology={topology}", *flags,
    *(f"--config.{name}={value}" for name, value in fields.items()),
  ]  # fmt: skip
  return subprocess.run(
    command,
    cwd=tiny_run.ROOT,
    env=tiny_run.environment(),
    capture_output=True,
    text=True,
    timeout=600,
  )


def test_what_fits(tmp_path):
  """Without output from libtpu."""
  file = tmp_path / "report.json"
  done = _run(f"--json={file}")
  assert done.returncode == 0 and not done.stderr
  _, text = done.stdout.split("decode step on 4 TPU v5 lite")
  assert "headroom" in text
  assert file.read_text().count('"fits": true') == 1
