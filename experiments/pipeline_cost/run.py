# SPDX-License-Identifier: Apache-2.0
"""What a pipeline sends and how long it idles, counted in its plan.

  python -m experiments.pipeline_cost.run
  python -m experiments.publish pipeline_cost

The first command counts the plans of `attnres_jax.pipeline`, which takes a
second, and writes transfers.csv, transitions.csv and bubbles.csv. The second
fills the tables of the documents and draws the figure. That devices receive and
links carry exactly what the plan says is a test:
tests/pipeline/received_test.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import pathlib
import sys
from typing import Any

from matplotlib import figure as figure_lib

from attnres_jax.common import command_line
from attnres_jax.common import csv_rows
from attnres_jax.pipeline import __main__ as command
from attnres_jax.pipeline import layout as layout_lib
from experiments.pages import readme
from experiments.pipeline_cost import orders
from experiments.pipeline_cost import tpu

# P ranks, V virtual stages each, K chunks per block.
FIG_3 = (4, 2, 2)
SHAPES = (
  (4, 2, 1), FIG_3, (4, 4, 1), (8, 4, 1), (8, 4, 2), (4, 1, 1), (8, 1, 2),
)  # fmt: skip
BUBBLES = (
  (4, 1, 16), (4, 2, 16), (4, 4, 16), (8, 1, 32), (8, 2, 32), (8, 4, 32),
)  # fmt: skip
RULES = layout_lib.RULES
_CLOSED_FORMS = {
  "naive": layout_lib.naive_total,
  "cached": layout_lib.cached_total,
  "minimum": layout_lib.minimum_total,
}
_BACKWARD_TIME = 2.0
_CLOCKS = ("lockstep", "free")
_COLOURS = ("#c7c7c7", "#1f77b4", "#2ca02c")

Rows = readme.Rows
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  parser = command_line.Parser(
    "python -m experiments.pipeline_cost.run", __doc__
  )
  parser.parse_args(argv)
  return command_line.run(_write)


def _write() -> None:
  parts = {
    "transfers": transfers,
    "transitions": transitions,
    "bubbles": bubbles,
  }
  for name, make in parts.items():
    csv_rows.write(PUBLISHED.folder / f"{name}.csv", make())


def make_layout(shape: Sequence[int]) -> layout_lib.Layout:
  """A layout of a shape (P, V, K) with one sublayer per chunk."""
  ranks, stages, chunks_per_block = shape
  return layout_lib.Layout(ranks, stages, 1, chunks_per_block)


def transfers() -> Iterator[Row]:
  """A row per shape and rule: vectors per microbatch, forward.

  `closed_form` is Eq. 7, Eq. 8 and the minimum for blocks that complete at an
  even pace; `planned` counts whole blocks; `partials` are running sums;
  `carried` is what links carry, padding and running sums included.
  """
  for shape in SHAPES:
    layout = make_layout(shape)
    for rule in RULES:
      links = sum(layout.link_vectors(rule)) + sum(layout.link_partials())
      yield dict(zip("PVK", shape)) | dict(
        rule=rule,
        closed_form=_CLOSED_FORMS[rule](*shape[:2], 1 / shape[2]),
        planned_without_embedding=layout.total_vectors(rule, embedding=False),
        planned=layout.total_vectors(rule),
        partials=layout.total_partials(),
        carried=shape[1] * links,
      )


def transitions() -> Iterator[Row]:
  """A row per boundary between the chunks of Fig. 3."""
  layout = make_layout(FIG_3)
  for same in zip(*(layout.transitions(rule) for rule in RULES)):
    blocks = [" ".join(f"b{b}" for b in one.blocks) for one in same]
    first = same[0]
    yield (
      dict(chunk=first.chunk, receiver=first.receiver)
      | dict(zip(RULES, blocks))
      | dict(partial=first.partial)
    )


def bubbles() -> Iterator[Row]:
  """A row per shape, order and clock: idle time over work time.

  Backward takes twice as long as forward. `closed_form` is (P - 1) / (V M).
  """
  for ranks, stages, microbatches in BUBBLES:
    for order, make in orders.ORDERS.items():
      schedule = make(make_layout((ranks, stages, stages)), microbatches)
      work = stages * microbatches * (1.0 + _BACKWARD_TIME)
      totals = (
        schedule.total_time(1.0, _BACKWARD_TIME),
        orders.free_time(schedule, 1.0, _BACKWARD_TIME),
      )
      for clock, total in zip(_CLOCKS, totals):
        yield dict(
          P=ranks,
          V=stages,
          M=microbatches,
          order=order,
          clock=clock,
          bubble=round(total / work - 1, 6),
          closed_form=round((ranks - 1) / (stages * microbatches), 6),
          units_in_flight=max(
            schedule.peaks(rank).units for rank in range(ranks)
          ),
        )


def transfers_table(rows: Rows) -> str:
  """Vectors by formula, by plan and on links; a row per shape."""
  header = ["P, V, K"]
  for rule in RULES:
    header += [f"{rule}: formula", "planned", "on links"]
  lines = []
  for shape, own in _by_shape(rows, "PVK").items():
    cells = [shape]
    for row in own:
      embedding = int(row["planned"]) - int(row["planned_without_embedding"])
      cells += [
        f"{float(row['closed_form']):g}",
        f"{row['planned_without_embedding']} + {embedding}",
        row["carried"],
      ]
    lines.append(cells)
  return readme.table(header, lines)


def transitions_table(rows: Rows) -> str:
  """Fig. 3, boundary by boundary."""
  header = ["into chunk", "on rank", *RULES, "running sum"]
  lines = [
    [row["chunk"], row["receiver"], *(row[rule] for rule in RULES)]
    + ["yes" if row["partial"] == "True" else ""]
    for row in rows
  ]
  totals = [str(sum(len(row[rule].split()) for row in rows)) for rule in RULES]
  partials = sum(row["partial"] == "True" for row in rows)
  lines.append(["**total**", "", *totals, str(partials)])
  return readme.table(header, lines)


def bubbles_table(rows: Rows) -> str:
  """Idle time over work time; a row per shape."""
  kinds = [f"{order}, {clock}" for order in orders.ORDERS for clock in _CLOCKS]
  lines = []
  for shape, own in _by_shape(rows, "PVM").items():
    shares = [own[0]["closed_form"], *(row["bubble"] for row in own)]
    units = [row["units_in_flight"] for row in own if row["clock"] == "free"]
    percent = [f"{float(share):.1%}" for share in shares]
    lines.append([shape, *percent, ", ".join(units)])
  units = f"units in flight: {', '.join(orders.ORDERS)}"
  return readme.table(["P, V, M", "ideal", *kinds, units], lines)


def draw(rows: Rows) -> figure_lib.Figure:
  """Planned vectors of each shape under each rule, and the formulas."""
  figure = figure_lib.Figure(figsize=(6.4, 3.4), layout="constrained")
  axes = figure.subplots()
  shapes = _by_shape(rows, "PVK")
  for i, (rule, colour) in enumerate(zip(RULES, _COLOURS)):
    own = [rows[i] for rows in shapes.values()]
    x = [j + 0.27 * (i - 1) for j in range(len(own))]
    planned = [int(row["planned"]) for row in own]
    axes.bar(x, planned, 0.25, color=colour, label=rule)
    axes.plot(x, [float(row["closed_form"]) for row in own], "k_", markersize=9)
  axes.plot([], [], "k_", label="Eq. 7, Eq. 8, minimum")
  axes.set_yscale("log")
  axes.set_xticks(range(len(shapes)), list(shapes))
  axes.set_xlabel("P, V, K")
  axes.set_title("block vectors received per microbatch", fontsize=10)
  axes.legend(frameon=False, fontsize=8)
  axes.spines[["top", "right"]].set_visible(False)
  return figure


def _drawn(part: str, rows: Rows) -> str:
  """The output of one part of `python -m attnres_jax.pipeline`."""
  del rows  # It is computed from the plan.
  return f"```\n{command.draw(['--show', part])}```"


def _by_shape(rows: Rows, sizes: str) -> dict[str, list[Mapping[str, Any]]]:
  """Rows by the cells of their sizes, in the order of the file."""
  found: dict[str, list[Mapping[str, Any]]] = {}
  for row in rows:
    shape = ", ".join(row[name] for name in sizes)
    found.setdefault(shape, []).append(row)
  return found


_EXPLANATION = "../../docs/pipeline.md"
_TABLES: Mapping[str, Callable[[Rows], str]] = {
  "transfers": transfers_table,
  "transitions": transitions_table,
  "bubbles": bubbles_table,
}
PUBLISHED = readme.Published(
  pathlib.Path(__file__).parent,
  [
    *(readme.Place(make, name, name) for name, make in _TABLES.items()),
    readme.Place(functools.partial(tpu.table, "48b"), "pod", "tpu"),
    readme.Place(functools.partial(tpu.table, "4_layers"), "rules", "tpu"),
    readme.Place(transfers_table, "transfers", "transfers", _EXPLANATION),
    *(
      readme.Place(
        functools.partial(_drawn, part), f"drawn_{part}", "", _EXPLANATION
      )
      for part in command.PARTS
    ),
  ],
  {"figure.svg": draw},
  ("transfers",),
)

if __name__ == "__main__":
  sys.exit(main())
