# SPDX-License-Identifier: Apache-2.0
"""What the paper's 25 shapes take on each slice, as planned.

From the rows of configs/plans.csv, which `attnres_jax.plan.search` compiled.
"""

from collections.abc import Iterable, Sequence
import re

from attnres_jax.analysis import figures
from attnres_jax.scaling import paper
from configs import arch_sweep
from experiments.pages import planned
from experiments.pages import readme as readme_lib

_SHAPES = tuple(
  (float(cell.width_per_layer), cell.heads_per_layer) for cell in paper.FIG_7
)


def table(rows: Sequence[planned.Row]) -> str:
  """A line per slice: ranges over shapes, and chip-hours of whole sweeps."""
  found = of_shapes(rows)
  lines = []
  for slice_name in dict.fromkeys(place for place, *_ in found):
    pairs = [
      [found.get((slice_name, shape, one)) for one in arch_sweep.SCHEMES]
      for shape in _SHAPES
    ]
    seconds = [
      [float(row["step_seconds"]) for row in pair if row]
      for pair in pairs
      if all(pair)
    ]
    known = [row for pair in pairs for row in pair if row]
    hours = [
      f"{sum(int(row['chip_hours']) for row in own if row):,}"
      for own in zip(*pairs)
    ]
    lines.append([
      slice_name, f"{len(seconds)} of {len(_SHAPES)}",
      *(_range((pair[i] for pair in seconds), 2) for i in range(2)),
      _range((b / a for a, b in seconds), 3),
      _range((float(row["memory_seconds"]) / float(row["compute_seconds"])
              for row in known), 2),
      f"{min(float(row['headroom_GiB']) for row in known):.1f}", *hours,
    ])  # fmt: skip
  names = [figures.name_of(scheme) for scheme in arch_sweep.SCHEMES]
  header = (
    "slice", "shapes", *(f"{name}: a step, s" for name in names), "ratio",
    "memory over compute", "least headroom, GiB",
    *(f"{name}: chip-hours" for name in names),
  )  # fmt: skip
  origin = planned.origin(list(found.values()))
  return f"{readme_lib.table(header, lines)}\n\n{origin}"


def of_shapes(
  rows: Sequence[planned.Row],
) -> dict[tuple[str, tuple[float, float], str], planned.Row]:
  """Rows of plans by slice, (rho, eta) and scheme."""
  found = {}
  for row in rows:
    match = re.match(r"rho([\d.]+)-eta([\d.]+)-(\w+)-", row["config"])
    shape = match and (float(match[1]), float(match[2]))
    if match and shape in _SHAPES:
      found[row["slice"], shape, match[3]] = row
  return found


def _range(values: Iterable[float], digits: int) -> str:
  """The smallest and the largest."""
  known = list(values)
  if not known:
    return ""
  return f"{min(known):.{digits}f} to {max(known):.{digits}f}"
