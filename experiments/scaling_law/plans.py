# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/launch.md and docs/plan.md: what sweeps take on a slice.

From the rows of configs/plans.csv, which `attnres_jax.plan.search` compiled.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import re

from attnres_jax.models import residuals
from attnres_jax.scaling import grid
from attnres_jax.scaling import paper
from attnres_jax.sweep import budget
from attnres_jax.sweep.pages import page
from configs import scaling
from experiments.pages import readme as readme_lib

Row = Mapping[str, str]

_BUDGETS = (50, 500, 5000)
# Any text of the scale's vocabulary; nothing of it is read.
_TEXT = dict.fromkeys(
  ("pod", "paper"),
  {"data.source": "tokens", "data.path": "gs://X", "data.tokenizer": "ids"},
)
_SIZES = tuple(size.name for size in paper.TABLE_2)


def table(rows: Sequence[Row]) -> str:
  """Chip-hours of each size, a line per slice and scheme."""
  plans = _of_table_2(rows)
  lines = []
  for slice_name, scheme in itertools.product(
    dict.fromkeys(row["slice"] for row in plans.values()), scaling.SCHEMES
  ):
    listed = [plans.get((slice_name, size, scheme)) for size in _SIZES]
    hours = [int(row["chip_hours"]) if row else 0 for row in listed]
    cells = [f"{hour:,}" if hour else "" for hour in (*hours, sum(hours))]
    if not all(hours):
      cells[-1] = ""
    label = residuals.RESIDUALS[scheme].style.label
    lines.append([slice_name, label, *cells])
  header = "slice", "scheme", *_SIZES, "all five"
  listed = list(plans.values())
  origin = f"Compiled up to the schedule, not run: {readme_lib.origin(listed)}"
  return readme_lib.text(page.Table(header, lines), _bound(listed), origin)


def bought(rows: Sequence[Row]) -> str:
  """What 50, 500 and 5,000 chip-hours buy: a line per budget and slice.

  A larger budget has no line where it buys no more.
  """
  prices = []
  for scale, text in _TEXT.items():
    runs = grid.load(f"configs/scaling.py:scale={scale},planned", text)
    prices += [(scale, runs, p) for p in budget.prices(runs, rows)]
  lines, listed = [], set()
  for most in _BUDGETS:
    for scale, runs, price in prices:
      sizes = {name.partition("-")[0] for name in price.missing}
      hours = {
        name: needed
        for name, needed in price.hours.items()
        if name.partition("-")[0] not in sizes
      }
      known_prices = dataclasses.replace(price, hours=hours)
      pattern, total = budget.fitting(known_prices, most)
      if not pattern or (price.slice_name, pattern) in listed:
        continue
      listed.add((price.slice_name, pattern))
      chosen = grid.select(runs, pattern)
      names = dict.fromkeys(run.overrides["size"].upper() for run in chosen)
      tokens = budget.tokens(chosen) / 1e9
      lines.append([
        f"{most:,}", price.slice_name, scale, ", ".join(names),
        str(len(chosen)), f"{tokens:.1f}", f"{total:,.0f}",
      ])  # fmt: skip
  header = (
    "chip-hours", "slice", "scale", "sizes", "runs", "tokens, 1e9",
    "cost, at least",
  )  # fmt: skip
  return readme_lib.text(page.Table(header, lines))


def _of_table_2(rows: Sequence[Row]) -> dict[tuple[str, str, str], Row]:
  """By slice, size and scheme."""
  plans = {}
  for row in rows:
    match = re.match(r"(\d+m)-(\w+)-seed", row["config"])
    if match and (size := match[1].upper()) in _SIZES:
      plans[row["slice"], size, match[2]] = row
  return plans


def _bound(rows: Sequence[Row]) -> str:
  """How far steps are from their compute, a sentence per slice."""
  times: dict[str, list[float]] = {}
  for row in rows:
    ratios = times.setdefault(row["slice"], [])
    ratios.append(float(row["step_seconds"]) / float(row["compute_seconds"]))
  return " ".join(
    f"On {name}, a step takes {min(ratios):.2f} to {max(ratios):.2f} times its"
    " compute."
    for name, ratios in times.items()
  )
