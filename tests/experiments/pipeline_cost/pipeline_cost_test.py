# SPDX-License-Identifier: Apache-2.0
"""Counts of the plan against the paper's, and the command that writes them."""

from experiments.pipeline_cost import run

FILES = ("transfers", "transitions", "bubbles")


def test_links_of_fig_3_and_the_paper_s_redundant_transmissions():
  rows = {
    (*(row[n] for n in "PVK"), row["rule"]): row for row in run.transfers()
  }
  fig_3 = [rows[*run.FIG_3, rule]["planned"] for rule in run.RULES]
  assert fig_3 == [19, 13, 11] and fig_3[0] - fig_3[1] == 6
  # A tick with one virtual stage carries only what is needed.
  for row in rows.values():
    needed = row["planned"] + row["partials"]
    assert (row["carried"] == needed) == (row["V"] == 1)


def test_bubbles():
  rows = list(run.bubbles())
  assert len(rows) == 6 * 3 * 2
  for row in rows:
    if (row["order"], row["clock"]) == ("1f1b", "lockstep"):
      assert row["bubble"] > 1.5 * row["closed_form"]
    else:
      assert row["bubble"] == row["closed_form"]
  units = {
    row["order"]: row["units_in_flight"]
    for row in rows
    if (row["P"], row["V"]) == (4, 1)
  }
  assert units == {"fused": 7, "1f1b": 4, "gpipe": 16}


def test_the_command_writes_the_committed_rows(tmp_path, monkeypatch):
  folder = run.PUBLISHED.folder
  copy = run.PUBLISHED._replace(folder=tmp_path)
  monkeypatch.setattr(run, "PUBLISHED", copy)
  assert run.main([]) == 0
  for name in FILES:
    written = (tmp_path / f"{name}.csv").read_text()
    assert written == (folder / f"{name}.csv").read_text()
