# SPDX-License-Identifier: Apache-2.0
"""Draws schedules (Fig. 3) and transfers as text."""

from attnres_jax.common import text_table
from attnres_jax.pipeline import layout as layout_lib
from attnres_jax.pipeline import schedule as schedule_lib


def schedule_text(schedule: schedule_lib.Schedule) -> str:
  """A row per tick and a column per rank.

  `F1.3` is the forward of microbatch 3 through the rank's virtual stage 1,
  `B1.3` its backward.
  """
  layout = schedule.layout
  rows = [["tick", *(f"rank {rank}" for rank in range(layout.num_ranks))]]
  for tick in range(schedule.num_ticks):
    cells = []
    for rank in range(layout.num_ranks):
      units = zip("FB", schedule.at(tick, rank))
      cells.append(
        " ".join(
          f"{letter}{layout.virtual_stage(unit.chunk)}.{unit.microbatch}"
          for letter, unit in units
          if unit is not None
        )
        or "-"
      )
    rows.append([str(tick), *cells])
  return text_table.columns(rows, rule=True)


def transfers_text(layout: layout_lib.Layout) -> str:
  """What one microbatch sends over each boundary, for each rule."""
  rows = [["into chunk", "ranks", *layout_lib.RULES, "partial"]]
  by_rule = [layout.transitions(rule) for rule in layout_lib.RULES]
  for same in zip(*by_rule):
    first = same[0]
    rows.append(
      [
        str(first.chunk),
        f"{first.sender} -> {first.receiver}",
        *(" ".join(f"b{b}" for b in t.blocks) or "-" for t in same),
        "yes" if first.partial else "-",
      ]
    )
  totals = [str(layout.total_vectors(rule)) for rule in layout_lib.RULES]
  rows.append(["total", "", *totals, str(layout.total_partials())])
  return text_table.columns(rows, rule=True)
