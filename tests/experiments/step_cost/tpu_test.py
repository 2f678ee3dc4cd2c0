# SPDX-License-Identifier: Apache-2.0
"""The table of whole stacks: its rows, and its bytes without machine code."""

import os
import subprocess
import sys

import pytest

from attnres_jax.common import csv_rows
from experiments.step_cost import tpu
from tests import tiny_run


def test_rows_and_ratios(tmp_path):
  row = dict(
    stack="training", chip="v5p", arm="block, kernels", sublayers="4",
    block="2", tokens="8", width="16", bytes_GB="30.00", estimate_ms="",
    peak_GiB="3.00",
  )  # fmt: skip
  base = row | dict(arm="prenorm", bytes_GB="20.00", estimate_ms="5.00")
  path = tmp_path / "table.csv"
  tpu.add_row(path, row)
  tpu.add_row(path, base | dict(bytes_GB="10.00"))
  tpu.add_row(path, base)
  rows = {r["arm"]: r for r in csv_rows.read(path)}
  assert len(rows) == 2
  assert rows["prenorm"]["bytes_ratio"] == "1.000"
  found = rows["block, kernels"]
  assert found["bytes_ratio"] == "1.500" and found["peak_ratio"] == "1.000"
  assert found["estimate_ratio"] == ""


def test_the_committed_table_is_what_its_rows_give(tmp_path):
  committed = tiny_run.ROOT / "experiments" / "step_cost" / "tpu.csv"
  copy = tmp_path / "table.csv"
  for row in csv_rows.read(committed):
    tpu.add_row(copy, row)
  assert copy.read_text() == committed.read_text()


@pytest.mark.slow
@pytest.mark.needs("libtpu")
def test_bytes_before_machine_code_are_those_after(tmp_path):
  # In processes of their own: tests compile with less care.
  stack = "identity --chips v5p --sublayers 4 --block 2 --width 1024".split()
  rows = []
  for mode in ([], ["--bytes_only"]):
    path = tmp_path / f"table{len(mode)}.csv"
    command = [sys.executable, "-m", tpu.__name__, *stack, *mode]
    command += [f"--out={path}", "--arms=prenorm;block, kernels"]
    environment = os.environ | tiny_run.environment()
    subprocess.run(command, check=True, cwd=tiny_run.ROOT, env=environment)
    rows.append(csv_rows.read(path))
  for after, before in zip(*rows, strict=True):
    assert float(after["estimate_ms"]) > 0
    assert before["bytes_GB"] == after["bytes_GB"]
    assert before["bytes_ratio"] == after["bytes_ratio"]
