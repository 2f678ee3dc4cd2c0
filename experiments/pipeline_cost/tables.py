# SPDX-License-Identifier: Apache-2.0
"""Tables of the documents, and the figure, from the committed rows."""

from collections.abc import Callable, Hashable, Mapping
import functools
import pathlib

from matplotlib import figure as figure_lib

from attnres_jax.pipeline import __main__ as command
from attnres_jax.pipeline import layout as layout_lib
from experiments.pages import readme

# The columns of tpu.csv that are shown.
_POD_GIB = ("parameter", "optimiser", "peak", "headroom")
_POD_SECONDS = ("compute", "memory", "link", "lockstep")

_RULES = layout_lib.RULES
_COLOURS = ("#c7c7c7", "#1f77b4", "#2ca02c")
_ORDERS, _CLOCKS = ("fused", "1f1b", "gpipe"), ("lockstep", "free")
# In the labelled programs: four tokens of width eight, float32.
_VECTOR_BYTES = 128

Rows = readme.Rows


def transfers(rows: Rows) -> str:
  """Closed form, planned and received vectors, a row per shape."""
  header = ["P, V, K"]
  for rule in _RULES:
    header += [f"{rule}: formula", "planned", "received"]
  lines = []
  for shape, of_rules in _by_shape(rows).items():
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


def carried(rows: Rows) -> str:
  """What the links of the compiled programs carry, a row per shape."""
  header = ["P, V, K", "rule", "needed", "carried, CPU", "carried, TPU",
            "bytes of a step over planned bytes"]  # fmt: skip
  lines = []
  for shape, of_rules in _by_shape(rows).items():
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


def transitions(rows: Rows) -> str:
  """Fig. 3, boundary by boundary."""
  header = ["into chunk", "on rank", "naive", "cached", "minimum", "sum"]
  lines = [
    [row["chunk"], row["receiver"], *(row[rule] for rule in _RULES)]
    + ["yes" if row["partial"] == "True" else ""]
    for row in rows
  ]
  totals = [str(sum(len(row[rule].split()) for row in rows)) for rule in _RULES]
  partials = sum(row["partial"] == "True" for row in rows)
  lines.append(["**total**", "", *totals, str(partials)])
  return readme.table(header, lines)


def bubbles(rows: Rows) -> str:
  """Idle time over work time, a row per shape."""
  kinds = [(order, clock) for order in _ORDERS for clock in _CLOCKS]
  header = ["P, V, M", "ideal", *map(", ".join, kinds)]
  lines = []
  shapes = _grouped(rows, "PVM", lambda row: (row["order"], row["clock"]))
  for shape, found in shapes.items():
    shares = [found[kinds[0]]["closed_form"]]
    shares += [found[kind]["bubble"] for kind in kinds]
    units = [found[order, "free"]["units_in_flight"] for order in _ORDERS]
    percent = [f"{float(share):.1%}" for share in shares]
    lines.append([shape, *percent, ", ".join(units)])
  units = f"units in flight: {', '.join(_ORDERS)}"
  return readme.table([*header, units], lines)


def memory(rows: Rows) -> str:
  """Temporary memory in vectors, a row per variant."""
  counts = list(dict.fromkeys(row["M"] for row in rows))
  lines = [
    [variant, *(row["units"] for row in own), own[-1]["slots"]]
    for variant, own in _by_variant(rows).items()
  ]
  header = ["", *(f"M = {m}" for m in counts)]
  return readme.table([*header, "slots: inputs, blocks, gradients"], lines)


def step_time(rows: Rows) -> str:
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
    for row in rows
  ]
  header = ["", "processor time", "wall time", "processor, s", "wall, s"]
  return readme.table(header, lines)


def bounds(size: str, rows: Rows) -> str:
  """Memory and bounds of a size on a slice, a row per scheme and rule."""
  rows = [row for row in rows if row["size"] == size]
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
    lines.append([*cells, f"{float(row['bubble']):.0%}"])
  header = [f"{name}, GiB" for name in _POD_GIB]
  header += [f"{name}, s" for name in _POD_SECONDS]
  return readme.table(["", *header, "bubble"], lines)


def drawn(part: str, rows: Rows) -> str:
  """The output of one part of `python -m attnres_jax.pipeline`."""
  del rows  # It is computed, not measured.
  return f"```\n{command.draw(['--show', part])}```"


def draw(transfers: Rows, memory: Rows) -> figure_lib.Figure:
  """Left, received vectors under each rule; right, memory over microbatches."""
  figure = figure_lib.Figure(figsize=(9.4, 3.4), layout="constrained")
  left, right = figure.subplots(1, 2)
  shapes = _by_shape(transfers)
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
  for variant, own in _by_variant(memory).items():
    units = [float(row["units"]) for row in own]
    right.plot([int(row["M"]) for row in own], units, "o-", label=variant)
  right.set_xscale("log", base=2)
  right.set_xticks(counts := sorted({int(row["M"]) for row in memory}))
  right.set_xticklabels(list(map(str, counts)))
  right.set_xlabel("microbatches")
  right.set_ylim(0)
  right.set_title("temporary memory of a device, in vectors", fontsize=10)
  for axes in (left, right):
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
  return figure


def _by_shape(rows: Rows) -> dict[str, dict[Hashable, Mapping[str, str]]]:
  return _grouped(rows, "PVK", lambda row: row["rule"])


def _by_variant(rows: Rows) -> dict[str, list[Mapping[str, str]]]:
  found: dict[str, list[Mapping[str, str]]] = {}
  for row in rows:
    found.setdefault(row["variant"], []).append(row)
  return found


def _grouped(
  rows: Rows, sizes: str, key: Callable[[Mapping[str, str]], Hashable]
) -> dict[str, dict[Hashable, Mapping[str, str]]]:
  """{shape: {key: row}}, where a shape is the row's cells of `sizes`."""
  found: dict[str, dict[Hashable, Mapping[str, str]]] = {}
  for row in rows:
    shape = ", ".join(row[name] for name in sizes)
    found.setdefault(shape, {})[key(row)] = row
  return found


_PLACES = (
  (transfers, "transfers"),
  (carried, "transfers"),
  (transitions, "transitions"),
  (bubbles, "bubbles"),
  (memory, "memory"),
  (step_time, "step_time"),
)
_EXPLANATION = "../../docs/pipeline.md"
PUBLISHED = readme.Published(
  pathlib.Path(__file__).parent,
  [
    *(readme.Place(make, make.__name__, rows) for make, rows in _PLACES),
    readme.Place(functools.partial(bounds, "48b"), "pod", "tpu"),
    readme.Place(functools.partial(bounds, "4_layers"), "rules_on_pod", "tpu"),
    readme.Place(transfers, "transfers", "transfers", _EXPLANATION),
    *(
      readme.Place(
        functools.partial(drawn, part), f"drawn_{part}", "", _EXPLANATION
      )
      for part in command.PARTS
    ),
  ],
  {"figure.svg": draw},
  ("transfers", "memory"),
)
