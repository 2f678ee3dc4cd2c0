# SPDX-License-Identifier: Apache-2.0
"""Counts of the plan against the paper's, in the table of docs/pipeline.md."""

from experiments.pipeline_cost import run


def test_links_of_fig_3_and_the_paper_s_redundant_transmissions():
  lines = run.transfers().splitlines()[2:]
  split = [line.strip("| ").split(" | ") for line in lines]
  cells = {words[0]: words[1:] for words in split}
  naive, cached, minimum = (
    sum(map(int, cells["4, 2, 2"][i].split(" + "))) for i in (1, 4, 7)
  )
  assert [naive, cached, minimum] == [19, 13, 11] and naive - cached == 6
  # A tick with one virtual stage carries only what is needed.
  for shape in run.SHAPES:
    partials = run.make_layout(shape).total_partials()
    for i in (1, 4, 7):
      planned, carried = cells[", ".join(map(str, shape))][i : i + 2]
      needed = sum(map(int, planned.split(" + "))) + partials
      assert (int(carried) == needed) == (shape[1] == 1)
