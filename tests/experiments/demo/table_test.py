# SPDX-License-Identifier: Apache-2.0
"""The README says what the committed results say."""

import pytest

from experiments.demo import results
from experiments.demo import table
from tests.experiments.demo import demo_test


def test_table_is_put_in_its_place(tmp_path, monkeypatch):
  path = tmp_path / "results.csv"
  names = ("corpus", "hardware", "python", "jax", "commit")
  facts = {name: demo_test.FACTS[name] for name in names}
  results.write_csv(path, demo_test.all_runs(), demo_test.SECONDS, facts)
  monkeypatch.setattr(table, "RESULTS", path)
  readme = "above\n<!-- results: how -->\nold\n<!-- /results -->\nbelow\n"
  once = table.with_table(readme)
  assert once.startswith("above\n") and once.endswith("\nbelow\n")
  assert "old" not in once and "| Block AttnRes | **1.460**" in once
  assert table.with_table(once) == once
  with pytest.raises(ValueError, match="no `<!-- results"):
    table.with_table("no place")


def test_readme_shows_the_committed_results():
  readme = table.README.read_text(encoding="utf-8")
  assert "<!-- results: python -m experiments.demo.table -->" in readme
  if table.RESULTS.exists():
    assert readme == table.with_table(readme), (
      "run `python -m experiments.demo.table`"
    )
