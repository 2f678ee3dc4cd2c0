# SPDX-License-Identifier: Apache-2.0
"""The table of docs/launch.md: what Table 2 takes on each slice, as planned.

From the rows of configs/plans.csv, which `attnres_jax.plan.search` compiled.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import re

from attnres_jax.models import residuals
from attnres_jax.scaling import grid
from attnres_jax.scaling import paper
from attnres_jax.sweep import budget
from configs import scaling
from experiments.pages import planned
from experiments.pages import readme as readme_lib

_BUDGETS = (50, 500, 5000)
# Any text of the scale's vocabulary; nothing of it is read.
_TEXT = dict.fromkeys(
  ("pod", "paper"),
  {"data.source": "tokens", "data.path": "gs://X", "data.tokenizer": "ids"},
)
_SIZES = tuple(size.name for size in paper.TABLE_2)


def table(rows: Sequence[planned.Row]) -> str:
  """A line per slice, size and scheme; below, the chip-hours of the sweep."""
  found = _of_table_2(rows)
  slices = dict.fromkeys(row["slice"] for row in found.values())
  lines, sums = [], []
  for slice_name in slices:
    for scheme in scaling.SCHEMES:
      known = {
        size: row
        for size in _SIZES
        if (row := found.get((slice_name, size, scheme)))
      }
      lines += [_line(size, scheme, row) for size, row in known.items()]
      if known:
        sums.append(_sum(slice_name, scheme, known))
  header = (
    "slice", "size", "scheme", "data x fsdp x expert", "microbatches", "remat",
    "headroom, GiB", "step, s", "compute, s", "bound", "MFU bound",
    "chip-hours",
  )  # fmt: skip
  origin = planned.origin(list(found.values()))
  totals = readme_lib.table(
    ("slice", "scheme", "sizes planned", "chip-hours of these"), sums
  )
  return f"{readme_lib.table(header, lines)}\n\n{totals}\n\n{origin}"


def bought(rows: Sequence[planned.Row]) -> str:
  """What 50, 500 and 5,000 chip-hours buy: a line per budget and slice.

  A larger budget has no line where it buys no more.
  """
  prices = []
  for scale, text in _TEXT.items():
    runs = grid.load(f"configs/scaling.py:scale={scale},planned", text)
    prices += [(scale, runs, one) for one in budget.prices(runs, rows)]
  lines, listed = [], set()
  for most in _BUDGETS:
    for scale, runs, price in prices:
      sizes = {name.partition("-")[0] for name in price.missing}
      hours = {
        name: one
        for name, one in price.hours.items()
        if name.partition("-")[0] not in sizes
      }
      pattern, total = budget.fitting(
        dataclasses.replace(price, hours=hours), most
      )
      if not pattern or (price.slice_name, pattern) in listed:
        continue
      listed.add((price.slice_name, pattern))
      chosen = grid.select(runs, pattern)
      found = dict.fromkeys(run.overrides["size"].upper() for run in chosen)
      tokens = budget.tokens(chosen) / 1e9
      lines.append([
        f"{most:,}", price.slice_name, scale, ", ".join(found),
        str(len(chosen)), f"{tokens:.1f}", f"{total:,.0f}",
      ])  # fmt: skip
  header = (
    "chip-hours", "slice", "scale", "sizes", "runs", "tokens, 1e9",
    "cost, at least",
  )  # fmt: skip
  return readme_lib.table(header, lines)


def _of_table_2(
  rows: Sequence[planned.Row],
) -> dict[tuple[str, str, str], planned.Row]:
  """By slice, size and scheme."""
  found = {}
  for row in rows:
    match = re.match(r"(\d+m)-(\w+)-seed", row["config"])
    if match and (size := match[1].upper()) in _SIZES:
      found[row["slice"], size, match[2]] = row
  return found


def _line(size: str, scheme: str, row: planned.Row) -> list[str]:
  return [
    row["slice"], size, residuals.RESIDUALS[scheme].style.label,
    planned.mesh(row), row["microbatches"],
    row["remat"], row["headroom_GiB"], f"{float(row['step_seconds']):.2f}",
    f"{float(row['compute_seconds']):.2f}", row["bound"],
    f"{float(row['mfu_bound']):.0%}", row["chip_hours"],
  ]  # fmt: skip


def _sum(
  slice_name: str, scheme: str, known: Mapping[str, planned.Row]
) -> list[str]:
  hours = sum(int(row["chip_hours"]) for row in known.values())
  label = residuals.RESIDUALS[scheme].style.label
  number = f"{len(known)} of {len(_SIZES)}"
  if len(known) == len(_SIZES):
    number = "all"
  return [slice_name, label, number, f"{hours:,}"]
