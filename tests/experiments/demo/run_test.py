# SPDX-License-Identifier: Apache-2.0
"""The demo's command, with a few steps, to its end."""

import sys

import pytest

from attnres_jax.common import csv_rows
from experiments.demo import results
from experiments.demo import run as run_lib


@pytest.mark.slow
def test_the_command_trains_and_reports(tmp_path, monkeypatch):
  monkeypatch.setattr(
    sys, "argv", ["run", f"--workdir={tmp_path}", "--steps=8"]
  )
  assert run_lib.main() == 0
  rows = csv_rows.read(tmp_path / "results.csv")
  # Four schemes and two shorter runs of PreNorm, with two seeds.
  assert len(rows) == 12 and len(results.full(rows)) == 8
  found = results.more_steps(rows, "block_attnres")
  assert found.low <= found.value <= found.high
  page = (tmp_path / "report.html").read_text()
  assert "PreNorm needs <b>" in page and "Block AttnRes, pre-MLP" in page
