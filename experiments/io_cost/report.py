# SPDX-License-Identifier: Apache-2.0
"""The tables and the figure of the README, from the rows."""

from collections.abc import Mapping, Sequence

from matplotlib import figure as figure_lib

from attnres_jax.analysis import figures
from experiments.pages import readme

Row = Mapping[str, str]


def table(rows: Sequence[Row]) -> str:
  """The schemes of Table 1 at every depth, and all schemes at Table 1's."""
  printed = [row for row in rows if row["printed"]]
  others = [row for row in rows if not row["printed"]]
  header = "scheme", "L", "S", "printed", "counted", "reads", "writes"
  lines = [
    [
      figures.name_of(row["scheme"]),
      row["sublayers"],
      row["block_size"],
      f"{float(row['printed']):.2f}",
      f"{_total(row):.2f}",
      f"{float(row['reads']):.2f}",
      f"{float(row['writes']):.2f}",
    ]
    for row in printed
  ]
  shown = [
    [figures.name_of(row["scheme"]), f"{_total(row):.2f}"] for row in others
  ]
  python, jax, commit = (
    ", ".join(dict.fromkeys(row[name] for row in rows))
    for name in ("python", "jax", "commit")
  )
  deep = others[0]
  return "\n\n".join(
    [
      readme.table(header, lines),
      f"Other schemes, at L={deep['sublayers']} and S={deep['block_size']}:",
      readme.table(("scheme", "counted"), shown),
      f"Python {python}, jax {jax}, commit {commit}.",
    ]
  )


def figure(rows: Sequence[Row]) -> figure_lib.Figure:
  """A bar per scheme at the depth of Table 1, and its printed numbers."""
  first = rows[0]["depth"]
  rows = sorted((r for r in rows if r["depth"] == first), key=_total)
  drawn = figure_lib.Figure(
    figsize=(8.4, 0.2 * len(rows)), layout="constrained"
  )
  axes = drawn.subplots()
  names = [figures.name_of(row["scheme"]) for row in rows]
  colours = [figures.look_of(row["scheme"]).colour for row in rows]
  axes.barh(names, [_total(row) for row in rows], color=colours, height=0.7)
  known = [(i, float(r["printed"])) for i, r in enumerate(rows) if r["printed"]]
  axes.plot(
    [x for _, x in known],
    [y for y, _ in known],
    "k|",
    markersize=9,
    markeredgewidth=2,
    label="printed in Table 1",
  )
  axes.set_xscale("log")
  axes.set_xticks([3, 5, 10, 20, 50, 100], ["3", "5", "10", "20", "50", "100"])
  axes.minorticks_off()
  axes.set_xlabel("vectors read or written per token and sublayer")
  axes.set_ylim(-0.6, len(rows) - 0.4)
  axes.tick_params(axis="y", length=0, labelsize=8)
  figures.style(axes)
  axes.legend(loc="lower right", frameon=False)
  return drawn


def _total(row: Row) -> float:
  return float(row["reads"]) + float(row["writes"])
