# SPDX-License-Identifier: Apache-2.0
"""From a random Llama to its class in PyTorch, as docs/interop.md prints."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from attnres_jax.train import metrics
from tests import tiny_run

DOCUMENT = tiny_run.ROOT / "docs/interop.md"


def commands():
  """The blocks of the section, from its Python on, as words."""
  section = DOCUMENT.read_text().partition("## From nothing to an export\n")[2]
  python, shell = re.findall(r"^```\w*\n(.*?)^```$", section, re.S | re.M)[:2]
  lines = shell.replace("\\\n", " ").splitlines()
  return [["python", "-c", python], *map(shlex.split, lines)]


@pytest.mark.slow
@pytest.mark.needs("accelerate")
@pytest.mark.needs("torch")
def test_the_chain(tmp_path):
  environment = tiny_run.environment()
  # As a user has it: programs are compiled as fast as they run.
  del environment["JAX_DISABLE_MOST_OPTIMIZATIONS"]
  outputs = {}
  for python, *command in commands():
    assert python == "python"
    done = subprocess.run(
      [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True,
      env=environment | {"HF_HUB_OFFLINE": "1", "HF_HOME": os.fspath(tmp_path)},
      check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    outputs[command[1]] = done.stdout
  assert len(outputs) == 5
  losses = [
    row["loss"] for row in metrics.read_rows(tmp_path / "runs/more", "train")
  ]
  assert len(losses) == 50 and losses[-1] < losses[0] - 1
  assert (tmp_path / "runs/out/modeling_attnres.py").exists()
