# SPDX-License-Identifier: Apache-2.0
"""The compiled table of GPU kernels, and that today's kernels agree with it."""

import pytest

from attnres_jax.common import csv_rows
from experiments.first_hour import gpu_static
from tests import tiny_run

ROOT = tiny_run.ROOT
ROWS = csv_rows.read(f"{ROOT}/kernels/benchmarks/results/gpu_static.csv")


# Eight queries over nine sources need more registers than a thread has.
SPILLS = ("backward", "8", "9")


def test_kernels_read_once():
  assert len(ROWS) >= 7
  for row in ROWS:
    spills = (row["pass"], row["queries"], row["sources"]) == SPILLS
    assert (row["spilled_bytes"] != "0") == spills, row
    assert row["load_bits"] == "128", row
    assert float(row["GB"]) < 1.1 * float(row["least_GB"]), row


@pytest.mark.needs("jax-cuda13-plugin")
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_table_is_of_these_kernels(direction):
  case = "depth_attention", 3, 8, 1024
  row = gpu_static.measure(case[0], direction, *case[1:])
  (known,) = (
    one
    for one in ROWS
    if (one["operator"], one["pass"]) == (case[0], direction)
    and (one["queries"], one["sources"], one["width"]) == ("3", "8", "1024")
  )
  same = ("launches", "GB", "spilled_bytes", "load_bits")
  assert {n: str(row[n]) for n in same} == {n: known[n] for n in same}
  # Versions of the assembler differ by a few registers.
  assert int(row["registers"]) <= int(known["registers"]) + 8
