# SPDX-License-Identifier: Apache-2.0
"""The table of docs/launch.md: what Table 2 takes on each slice, as planned.

From the rows of configs/plans.csv, which `attnres_jax.aot.plan` compiled.
"""

from collections.abc import Mapping, Sequence
import re

from attnres_jax.models import residuals
from attnres_jax.scaling import paper
from configs import scaling
from experiments.pages import planned
from experiments.pages import readme as readme_lib

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
