# SPDX-License-Identifier: Apache-2.0
"""The table of whole stacks: its rows, and its bytes without machine code."""

import csv
import importlib.util
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest
from benchmarks import tpu_stack
import pytest

needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="not run: libtpu, the TPU compiler, is not installed here",
)


class TpuStackTest(absltest.TestCase):
  def test_rows_and_ratios(self):
    row = dict(
      stack="training", chip="v5p", arm="block, kernels", sublayers="4",
      block="2", tokens="8", width="16", bytes_GB="30.00", estimate_ms="",
      peak_GiB="3.00",
    )  # fmt: skip
    base = row | dict(arm="prenorm", bytes_GB="20.00", estimate_ms="5.00")
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "table.csv"
      tpu_stack.add_row(path, row)
      tpu_stack.add_row(path, base | dict(bytes_GB="10.00"))
      tpu_stack.add_row(path, base)
      with open(path) as file:
        rows = {r["arm"]: r for r in csv.DictReader(file)}
    self.assertLen(rows, 2)
    self.assertEqual(rows["prenorm"]["bytes_ratio"], "1.000")
    self.assertEqual(rows["block, kernels"]["bytes_ratio"], "1.500")
    self.assertEqual(rows["block, kernels"]["estimate_ratio"], "")
    self.assertEqual(rows["block, kernels"]["peak_ratio"], "1.000")

  @needs_libtpu
  def test_bytes_before_machine_code_are_those_after(self):
    # In processes of their own: tests compile with less care.
    stack = "identity --chips v5p --sublayers 4 --block 2 --width 1024"
    rows = []
    for mode in ("", "--bytes_only"):
      with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "table.csv"
        command = f"{tpu_stack.__file__} {stack} {mode} --out {path}".split()
        arms = ["--arms", "prenorm;block, kernels"]
        subprocess.run([sys.executable, *command, *arms], check=True)
        with open(path) as file:
          rows.append(list(csv.DictReader(file)))
    for after, before in zip(*rows, strict=True):
      self.assertGreater(float(after["estimate_ms"]), 0)
      self.assertEqual(before["bytes_GB"], after["bytes_GB"])
      self.assertEqual(before["bytes_ratio"], after["bytes_ratio"])


if __name__ == "__main__":
  absltest.main()
