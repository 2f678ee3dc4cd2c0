# SPDX-License-Identifier: Apache-2.0
"""The compiled table of GPU kernels, and that today's kernels agree with it."""

import pytest

from attnres_jax.common import csv_rows
from experiments.first_hour import gpu_static
from tests import tiny_run

ROOT = tiny_run.ROOT
ROWS = csv_rows.read(f"{ROOT}/kernels/benchmarks/results/gpu_static.csv")


def test_every_shape_has_both_passes():
  keys = "operator", "queries", "sources", "width", "pass"
  cases = [tuple(row[key] for key in keys) for row in ROWS]
  assert cases == [
    (*map(str, shape), direction)
    for shape in gpu_static.SHAPES
    for direction in gpu_static.PASSES
  ]


def test_kernels_read_once_and_spill_nothing():
  for row in ROWS:
    assert row["spilled_bytes"] == "0", row
    assert row["load_bits"] == "128", row
    assert int(row["registers"]) <= 210 and int(row["barriers"]) < 30, row
    assert float(row["GB"]) < 1.08 * float(row["least_GB"]), row


@pytest.mark.needs("jax-cuda13-plugin")
@pytest.mark.parametrize(
  "case", [("depth_attention", 3, 8, 1024), ("depth_merge_norm", 1, 7, 1024)]
)
def test_the_table_is_of_these_kernels(case):
  row = gpu_static.measure(case[0], "backward", *case[1:])
  (committed,) = (
    r
    for r in ROWS
    if (r["operator"], r["pass"]) == (case[0], "backward")
    and (r["queries"], r["sources"], r["width"]) == tuple(map(str, case[1:]))
  )
  same = ("launches", "GB", "spilled_bytes", "load_bits", "barriers")
  assert {n: str(row[n]) for n in same} == {n: committed[n] for n in same}
  # Versions of the assembler differ by a few registers.
  assert abs(int(row["registers"]) - int(committed["registers"])) <= 8
