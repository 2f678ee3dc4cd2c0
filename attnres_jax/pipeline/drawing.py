# SPDX-License-Identifier: Apache-2.0
"""Draws schedules and transfers, as text and as a figure (Fig. 3)."""

from typing import Any

import numpy as np

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


def draw_schedule(
  schedule: schedule_lib.Schedule,
  *,
  ax: Any = None,
  forward_time: float = 1.0,
  backward_time: float = 2.0,
) -> Any:
  """Draws the work of each rank over time, with matplotlib.

  A row per rank. Colour is the virtual stage, the number the microbatch;
  forward is light and backward dark. White is idle.

  Args:
    schedule: what to draw.
    ax: axes to draw on; new ones by default.
    forward_time: of a chunk.
    backward_time: of a chunk.

  Returns:
    The axes.
  """
  from matplotlib import patches
  from matplotlib import pyplot as plt

  layout = schedule.layout
  times = (forward_time, backward_time)
  starts = schedule.start_times(*times)
  total = schedule.total_time(*times)
  if ax is None:
    width = min(40.0, max(6.0, 0.16 * total))
    height = 1.4 + 0.42 * layout.num_ranks
    _, ax = plt.subplots(figsize=(width, height), layout="constrained")
  hues = plt.get_cmap("tab10")
  # A light forward takes black digits, a dark backward white ones.
  looks = ((0.35, "black"), (0.95, "white"))
  for event, left in starts.items():
    (alpha, ink), time = looks[event.backward], times[event.backward]
    hue = hues(layout.virtual_stage(event.chunk) % 10)
    rank = layout.rank(event.chunk)
    ax.add_patch(
      patches.Rectangle(
        (left, rank - 0.46), time, 0.92,
        facecolor=(*hue[:3], alpha), edgecolor="white", linewidth=0.6,
      )
    )  # fmt: skip
    ax.text(
      left + time / 2, rank, str(event.microbatch), color=ink,
      ha="center", va="center", fontsize=7,
    )  # fmt: skip
  ax.set_xlim(0, total)
  ax.set_ylim(layout.num_ranks - 0.5, -0.5)
  ax.set_yticks(range(layout.num_ranks))
  ax.set_yticklabels([f"rank {rank}" for rank in range(layout.num_ranks)])
  ax.set_xlabel(f"time (a chunk takes {forward_time:g} + {backward_time:g})")
  for side in ("top", "right", "left"):
    ax.spines[side].set_visible(False)
  ax.tick_params(axis="y", length=0)
  bubble = schedule.bubble(*times)
  ax.set_title(
    f"{schedule.order}: P = {layout.num_ranks},"
    f" V = {layout.num_virtual_stages}, M = {schedule.num_microbatches};"
    f" bubble {bubble:.1%}",
    loc="left",
    fontsize=10,
  )
  stages = range(layout.num_virtual_stages)
  ax.figure.legend(
    handles=[
      patches.Patch(facecolor=(*hues(v % 10)[:3], alpha), label=f"{word} {v}")
      for v in stages
      for word, (alpha, _) in zip(("forward, stage", "backward, stage"), looks)
    ],
    ncols=min(4, 2 * layout.num_virtual_stages),
    fontsize=7,
    frameon=False,
    loc="outside lower center",
  )
  return ax


def draw_transfers(layout: layout_lib.Layout, *, ax: Any = None) -> Any:
  """Bars of the vectors over each boundary under each rule, with matplotlib.

  Args:
    layout: chunks and blocks.
    ax: axes to draw on; new ones by default.

  Returns:
    The axes.
  """
  from matplotlib import pyplot as plt

  if ax is None:
    width = max(6.0, 0.45 * layout.num_chunks)
    _, ax = plt.subplots(figsize=(width, 3.2), layout="constrained")
  colours = ("#c7c7c7", "#1f77b4", "#2ca02c")
  for i, (rule, colour) in enumerate(zip(layout_lib.RULES, colours)):
    counts = [len(t.blocks) for t in layout.transitions(rule)]
    chunks = np.arange(1, 1 + len(counts)) + 0.27 * (i - 1)
    total = layout.total_vectors(rule)
    ax.bar(chunks, counts, 0.25, color=colour, label=f"{rule}: {total}")
  for transition in layout.transitions("naive"):
    if transition.partial:
      ax.plot(transition.chunk, -0.25, "k^", markersize=4, clip_on=False)
  ax.set_xticks(range(1, layout.num_chunks))
  ax.set_xlabel("boundary into chunk (triangle: plus a partial sum)")
  ax.set_ylabel("block vectors per microbatch")
  ax.legend(frameon=False, fontsize=8, title="total", title_fontsize=8)
  for side in ("top", "right"):
    ax.spines[side].set_visible(False)
  ax.set_title(
    f"P = {layout.num_ranks}, V = {layout.num_virtual_stages},"
    f" {layout.num_blocks} blocks",
    loc="left",
    fontsize=10,
  )
  return ax
