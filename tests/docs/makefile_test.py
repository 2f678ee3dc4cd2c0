# SPDX-License-Identifier: Apache-2.0
"""Targets of the Makefile run what they say: an empty variable runs nothing."""

import subprocess

import pytest

from tests import tiny_run


@pytest.mark.parametrize(
  "target, command",
  [
    ("test", 'pytest -n 3 --dist worksteal -m "not more and not slow" -k name'),
    ("test-all", "python -m pytest -n 3 --dist worksteal -k name"),
    ("test-slow", 'pytest -n 3 --dist worksteal -m "slow or not slow" -k name'),
    ("lint", "ruff check ."),
    ("lint", "python dev/words.py"),
    ("demo", "python -m experiments.demo.run -k name"),
    ("sweep", "--launcher=together --set threads=3"),
    ("pod", "python -m attnres_jax.plan --config=configs/kimi_linear.py"),
    ("notebooks", "python -m notebooks.execute -k name"),
  ],
)
def test_a_target_runs_its_command(target, command):
  done = subprocess.run(
    ["make", "--dry-run", target, "JOBS=3", "ARGS=-k name"],
    cwd=tiny_run.ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  assert command in done.stdout
