# SPDX-License-Identifier: Apache-2.0
"""Results as CSV."""

from attnres_jax.common import csv_rows


def test_no_rows_are_an_empty_file(tmp_path):
  csv_rows.write(tmp_path / "rows.csv", [])
  assert (tmp_path / "rows.csv").read_bytes() == b""
  assert csv_rows.read(tmp_path / "rows.csv") == []


def test_rows_come_back_as_text_with_the_columns_of_all(tmp_path):
  path = tmp_path / "rows.csv"
  csv_rows.write(path, [{"a": 1, "b": "x, y"}, {"c": None, "a": 0.5}])
  assert path.read_bytes() == b'a,b,c\n1,"x, y",\n0.5,,\n'
  assert csv_rows.read(str(path)) == [
    {"a": "1", "b": "x, y", "c": ""},
    {"a": "0.5", "b": "", "c": ""},
  ]


def test_overrides_that_the_first_run_lacks_stay_before_results(tmp_path):
  rows = [{"run": "a", "loss": 2}, {"run": "b", "budget": 3, "loss": 1}]
  csv_rows.write(tmp_path / "rows.csv", rows)
  header, *_ = (tmp_path / "rows.csv").read_text().splitlines()
  assert header == "run,budget,loss"
