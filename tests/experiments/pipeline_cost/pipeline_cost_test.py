# SPDX-License-Identifier: Apache-2.0
"""Counts of the plan against the paper's, in the tables of the documents."""

from experiments.pipeline_cost import run


def _cells(table):
  lines = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
  return {cells[0]: cells[1:] for cells in lines}


def test_links_of_fig_3_and_the_paper_s_redundant_transmissions():
  cells = _cells(run.transfers())
  naive, cached, minimum = (
    sum(map(int, cells["4, 2, 2"][i].split(" + "))) for i in (1, 4, 7)
  )
  assert [naive, cached, minimum] == [19, 13, 11] and naive - cached == 6
  totals = _cells(run.transitions())["**total**"]
  assert totals[1:4] == ["19", "13", "11"]
  # A tick with one virtual stage carries only what is needed.
  for shape in run.SHAPES:
    partials = run.make_layout(shape).total_partials()
    for i in (1, 4, 7):
      planned, carried = cells[", ".join(map(str, shape))][i : i + 2]
      needed = sum(map(int, planned.split(" + "))) + partials
      assert (int(carried) == needed) == (shape[1] == 1)


def test_bubbles():
  rows = _cells(run.bubbles())
  assert len(rows) == 6
  for cells in rows.values():
    ideal, *shares = (float(cell.rstrip("%")) for cell in cells[:-1])
    assert shares.pop(2) > 1.5 * ideal  # 1f1b in lockstep.
    assert set(shares) == {ideal}
  assert rows["4, 1, 16"][-1] == "7, 4, 16"
