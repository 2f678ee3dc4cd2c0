# SPDX-License-Identifier: Apache-2.0
"""Fills the tables of the documents from the committed rows; draws the figure.

  python -m experiments.pipeline_cost.tables

In a document, a table is between `<!-- NAME: the command above -->` and `<!--
/NAME -->`. A test keeps documents and rows consistent.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import pathlib
import re

import matplotlib
from matplotlib import figure as figure_lib

from attnres_jax import csv_rows
from attnres_jax.pipeline import __main__ as command
from attnres_jax.pipeline import layout as layout_lib
from experiments.pages import readme

FOLDER = pathlib.Path(__file__).parent
DOCUMENTS = (
  FOLDER / "README.md",
  FOLDER.parents[1] / "docs" / "pipeline.md",
)
FIGURE = FOLDER / "figure.svg"

# The columns of tpu.csv that are shown.
_POD_GIB = ("parameter", "optimiser", "temporary", "peak", "headroom")
_POD_SECONDS = ("memory", "link", "compute")

Rows = Sequence[Mapping[str, str]]


def main() -> None:
  for path in DOCUMENTS:
    path.write_text(with_tables(path.read_text(encoding="utf-8")))
  # The same rows give the same file.
  with matplotlib.rc_context({"svg.hashsalt": FIGURE.stem}):
    draw().savefig(FIGURE, format="svg", metadata={"Date": None})


def with_tables(text: str) -> str:
  """`text` with its tables filled from the committed rows.

  Raises:
    KeyError: it has the name of an unknown table.
  """
  for name in re.findall(r"<!-- /(\w+) -->", text):
    text = readme.fill(text, name, TABLES[name]())
  return text


def read(name: str) -> Rows:
  """The committed rows of a part."""
  return csv_rows.read(FOLDER / f"{name}.csv")


def transfers() -> str:
  """Closed form, planned and received vectors, a row per shape."""
  header = ["P, V, K"]
  for rule in _RULES:
    header += [f"{rule}: formula", "planned", "received"]
  lines = []
  for shape, of_rules in _by_shape().items():
    cells = [shape]
    for rule in _RULES:
      row = of_rules[rule]
      without, whole = row["planned_without_embedding"], row["planned"]
      cells += [
        f"{float(row['closed_form']):g}",
        f"{without} + {int(whole) - int(without)}",
        row["received"],
      ]
    lines.append(cells)
  return readme.table(header, lines)


def carried() -> str:
  """What the links of the compiled programs carry, a row per shape."""
  header = ["P, V, K", "rule", "needed", "carried, CPU", "carried, TPU",
            "bytes of a step over planned bytes"]  # fmt: skip
  lines = []
  for shape, of_rules in _by_shape().items():
    for rule in _RULES:
      row = of_rules[rule]
      needed = int(row["planned"]) + int(row["partials"])
      both = needed * 2 * int(row["M"]) * _VECTOR_BYTES
      lines.append(
        [
          shape,
          rule,
          str(needed),
          row["cpu_forward"],
          row["tpu_forward"] or "not compiled",
          f"{int(row['cpu_bytes']) / both:.2f}",
        ]
      )
  return readme.table(header, lines)


def transitions() -> str:
  """Fig. 3, boundary by boundary."""
  header = ["into chunk", "on rank", "naive", "cached", "minimum", "sum"]
  rows = read("transitions")
  lines = [
    [row["chunk"], row["receiver"], *(row[rule] for rule in _RULES)]
    + ["yes" if row["partial"] == "True" else ""]
    for row in rows
  ]
  totals = [str(sum(len(row[rule].split()) for row in rows)) for rule in _RULES]
  partials = sum(row["partial"] == "True" for row in rows)
  lines.append(["**total**", "", *totals, str(partials)])
  return readme.table(header, lines)


def bubbles() -> str:
  """Idle time over work time, a row per shape."""
  rows = read("bubbles")
  columns = {
    "ideal": lambda row: row["closed_form"],
    **{
      f"{order}, {clock}": lambda row, key=(order, clock): _find(
        rows, row, key
      )["bubble"]
      for order in ("fused", "1f1b", "gpipe")
      for clock in ("lockstep", "free")
    },
  }
  header = ["P, V, M", *columns, "units in flight: fused, 1f1b, gpipe"]
  lines = []
  for row in rows:
    if (row["order"], row["clock"]) != ("fused", "lockstep"):
      continue
    units = [
      _find(rows, row, (order, "free"))["units_in_flight"]
      for order in ("fused", "1f1b", "gpipe")
    ]
    lines.append(
      [", ".join(row[name] for name in "PVM")]
      + [f"{float(column(row)):.1%}" for column in columns.values()]
      + [", ".join(units)]
    )
  return readme.table(header, lines)


def memory() -> str:
  """Temporary memory in vectors, a row per variant."""
  rows = read("memory")
  counts = list(dict.fromkeys(row["M"] for row in rows))
  lines = [
    [variant]
    + [row["units"] for row in rows if row["variant"] == variant]
    + [next(row["slots"] for row in rows[::-1] if row["variant"] == variant)]
    for variant in dict.fromkeys(row["variant"] for row in rows)
  ]
  header = ["", *(f"M = {m}" for m in counts)]
  return readme.table([*header, "slots: inputs, blocks, gradients"], lines)


def step_time() -> str:
  """Ratios to PreNorm, a row per variant."""
  lines = [
    [row["variant"]]
    + [
      f"{float(row[f'{clock}_ratio']):.3f}"
      f" ({float(row[f'{clock}_ratio_low']):.3f} to"
      f" {float(row[f'{clock}_ratio_high']):.3f})"
      for clock in ("cpu", "wall")
    ]
    + [row["cpu_seconds"], row["wall_seconds"]]
    for row in read("step_time")
  ]
  header = ["", "processor time", "wall time", "processor, s", "wall, s"]
  return readme.table(header, lines)


def pod() -> str:
  """The 48B step on a slice."""
  return _bounds("48b")


def rules_on_pod() -> str:
  """A shallower network on a slice, under each rule."""
  return _bounds("4_layers")


def _bounds(size: str) -> str:
  """Memory and bounds of a size, a row per scheme and rule."""
  rows = [row for row in read("tpu") if row["size"] == size]
  baseline = next(row for row in rows if row["residual"] == "prenorm")
  lines = []
  for row in rows:
    # PreNorm has no blocks to which a rule could apply.
    cells = [row["residual"]]
    if row is not baseline:
      cells[0] += f", {row['rule']}"
    cells += [f"{float(row[f'{name}_GiB']):.2f}" for name in _POD_GIB]
    for name in _POD_SECONDS:
      seconds, of = (float(one[f"{name}_seconds"]) for one in (row, baseline))
      cells.append(f"{seconds:.3f} ({seconds / of:.3f})")
    lines.append(cells)
  header = [f"{name}, GiB" for name in _POD_GIB]
  header += [f"{name}, s" for name in _POD_SECONDS]
  return readme.table(["", *header], lines)


def drawn(part: str) -> str:
  """The output of one part of `python -m attnres_jax.pipeline`."""
  return f"```\n{command.draw(['--show', part])}```"


def draw() -> figure_lib.Figure:
  """Left, received vectors under each rule; right, memory over microbatches."""
  figure = figure_lib.Figure(figsize=(9.4, 3.4), layout="constrained")
  left, right = figure.subplots(1, 2)
  shapes = _by_shape()
  for i, (rule, colour) in enumerate(zip(_RULES, _COLOURS)):
    found = [of_rules[rule] for of_rules in shapes.values()]
    x = [j + 0.27 * (i - 1) for j in range(len(found))]
    left.bar(
      x, [int(row["received"]) for row in found], 0.25, color=colour, label=rule
    )
    formula = [float(row["closed_form"]) for row in found]
    left.plot(x, formula, "k_", markersize=9)
  left.plot([], [], "k_", label="Eq. 7, Eq. 8, minimum")
  left.set_yscale("log")
  left.set_xticks(range(len(shapes)), list(shapes))
  left.set_xlabel("P, V, K")
  left.set_title("block vectors received per microbatch", fontsize=10)
  rows = read("memory")
  for variant in dict.fromkeys(row["variant"] for row in rows):
    own = [row for row in rows if row["variant"] == variant]
    units = [float(row["units"]) for row in own]
    right.plot([int(row["M"]) for row in own], units, "o-", label=variant)
  right.set_xscale("log", base=2)
  right.set_xticks(counts := sorted({int(row["M"]) for row in rows}))
  right.set_xticklabels(list(map(str, counts)))
  right.set_xlabel("microbatches")
  right.set_ylim(0)
  right.set_title("temporary memory of a device, in vectors", fontsize=10)
  for axes in (left, right):
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
  return figure


_RULES = layout_lib.RULES
_COLOURS = ("#c7c7c7", "#1f77b4", "#2ca02c")
# In the labelled programs: four tokens of width eight, float32.
_VECTOR_BYTES = 128


def _by_shape() -> dict[str, dict[str, Mapping[str, str]]]:
  found: dict[str, dict[str, Mapping[str, str]]] = {}
  for row in read("transfers"):
    shape = ", ".join(row[name] for name in "PVK")
    found.setdefault(shape, {})[row["rule"]] = row
  return found


def _find(rows: Rows, like: Mapping[str, str], key: tuple[str, str]):
  (row,) = (
    row
    for row in rows
    if (row["order"], row["clock"]) == key
    and all(row[name] == like[name] for name in "PVM")
  )
  return row


_WRITTEN = (
  transfers, carried, transitions, bubbles, memory, step_time, pod,
  rules_on_pod,
)  # fmt: skip
TABLES: dict[str, Callable[[], str]] = {
  function.__name__: function for function in _WRITTEN
} | {f"drawn_{part}": functools.partial(drawn, part) for part in command.PARTS}


if __name__ == "__main__":
  main()
