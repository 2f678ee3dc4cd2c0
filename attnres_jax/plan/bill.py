# SPDX-License-Identifier: Apache-2.0
"""The bill of a step: one row per part, with its cost and its lower bound.

Costs are counted in the compiled program (`attribution`), and the parts add up
to the whole. Bounds are derived from shapes (`least`). The compiler does not
count FLOPs inside Pallas kernels, so a part with kernels is charged its bound,
or the products outside of its kernels if these alone are more.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from attnres_jax.common import chips
from attnres_jax.common import text_table
from attnres_jax.plan import attribution
from attnres_jax.plan import least as least_lib

Row = dict[str, Any]

# Above this ratio of FLOPs to those that are necessary, a report warns.
WARN = 1.2


def make_rows(
  costs: Mapping[str, attribution.Cost],
  least: Mapping[str, least_lib.Least],
  chip: chips.Chip,
) -> list[Row]:
  """The rows, the most expensive first; none for parts without any cost.

  A row has the fields of `attribution.Cost`, and `least_bytes` and
  `least_flops` (None where unknown). `charged_flops` include the FLOPs of
  kernels. `seconds` is the longest of its times at the chip's peaks, and
  `bound` names it. `share` is its fraction of the seconds of all parts.
  """
  rows: list[Row] = []
  for part in {**costs, **least}:
    cost = costs.get(part, attribution.Cost())
    needs = least.get(part, least_lib.Least())
    numbers = *dataclasses.astuple(cost), needs.moved_bytes, needs.flops
    if part != attribution.OTHER and not any(numbers):
      continue
    charged = cost.flops
    if cost.kernels:
      charged = max(charged, needs.flops or 0.0)
    times = dict(
      compute=charged / chip.peak_flops_per_second,
      memory=cost.moved_bytes / chip.hbm_bytes_per_second,
      link=cost.sent_bytes / chip.link_bytes_per_second,
    )
    bound = max(times, key=lambda name: times[name])
    rows.append(
      dict(part=part, **dataclasses.asdict(cost))
      | dict(least_bytes=needs.moved_bytes, least_flops=needs.flops)
      | dict(charged_flops=charged, seconds=times[bound], bound=bound)
    )
  total = sum(row["seconds"] for row in rows)
  for row in rows:
    row["share"] = row["seconds"] / total if total else 0.0
  return sorted(rows, key=lambda row: -row["seconds"])


def to_text(rows: Sequence[Row]) -> str:
  """The rows and their sum as a table."""
  names = (
    "moved_bytes", "least_bytes", "flops", "charged_flops", "least_flops",
    "kernels", "sent_bytes", "overlapped_bytes", "seconds", "share",
  )  # fmt: skip
  total: Row = {
    name: sum(row[name] or 0.0 for row in rows) for name in names
  } | dict(part="all", bound="")
  header = (
    "part", "share", "bound", "GB moved", "least", "ratio", "TFLOP", "least",
    "ratio", "GB sent", "overlapped",
  )  # fmt: skip
  return text_table.table(header, [_cells(row) for row in [*rows, total]])


def _cells(row: Row) -> tuple[str, ...]:
  moved, least = row["moved_bytes"], row["least_bytes"]
  charged, needed = row["charged_flops"], row["least_flops"]
  sent, overlapped = row["sent_bytes"], row["overlapped_bytes"]
  return (
    row["part"], f"{row['share']:.1%}", row["bound"],
    _amount(moved, 1e9), _amount(least, 1e9), _ratio(moved, least),
    _amount(charged, 1e12) + ("*" if row["kernels"] else ""),
    _amount(needed, 1e12), _ratio(charged, needed),
    _amount(sent, 1e9), f"{overlapped / sent:.0%}" if sent else "",
  )  # fmt: skip


def _amount(value: float | None, unit: float) -> str:
  if not value:
    return ""
  return (
    f"{value / unit:,.0f}" if value >= 100 * unit else f"{value / unit:.3g}"
  )


def _ratio(value: float, least: float | None) -> str:
  return f"{value / least:.2f}" if least else ""
