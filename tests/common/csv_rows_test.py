# SPDX-License-Identifier: Apache-2.0
"""Results as CSV."""

from attnres_jax.common import csv_rows


def test_no_rows_are_an_empty_file(tmp_path):
  csv_rows.write(tmp_path / "rows.csv", [])
  assert (tmp_path / "rows.csv").read_bytes() == b""
  assert csv_rows.read(tmp_path / "rows.csv") == []


def test_rows_come_back_as_text_with_the_columns_of_all(tmp_path):
  path = tmp_path / "rows.csv"
  # A column that the first row lacks stays before the ones that follow it.
  csv_rows.write(path, [{"a": 1, "b": "x, y"}, {"a": 0.5, "c": None, "b": ""}])
  assert path.read_bytes() == b'a,c,b\n1,,"x, y"\n0.5,,\n'
  assert csv_rows.read(str(path)) == [
    {"a": "1", "c": "", "b": "x, y"},
    {"a": "0.5", "c": "", "b": ""},
  ]
