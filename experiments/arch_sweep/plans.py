# SPDX-License-Identifier: Apache-2.0
"""What the paper's 25 shapes take on each slice, as planned.

From the rows of configs/plans.csv, which `attnres_jax.plan.search` compiled.
"""

from collections.abc import Sequence
import re

from attnres_jax.analysis import figures
from attnres_jax.scaling import paper
from configs import arch_sweep
from experiments.pages import planned
from experiments.pages import readme as readme_lib

BASELINE, OTHER = arch_sweep.SCHEMES
_SHAPES = tuple(
  (float(cell.width_per_layer), cell.heads_per_layer) for cell in paper.FIG_7
)


def table(rows: Sequence[planned.Row]) -> str:
  """A line per slice and shape; below, the chip-hours of whole sweeps."""
  found = of_shapes(rows)
  slices = dict.fromkeys(slice_name for slice_name, *_ in found)
  lines, sums = [], []
  for slice_name in slices:
    of_slice = [
      (shape, [found.get((slice_name, shape, s)) for s in arch_sweep.SCHEMES])
      for shape in _SHAPES
    ]
    lines += [_line(*one) for one in of_slice if any(one[1])]
    sums += [
      _sum(slice_name, scheme, [each[i] for _, each in of_slice if each[i]])
      for i, scheme in enumerate(arch_sweep.SCHEMES)
    ]
  names = [figures.name_of(scheme) for scheme in arch_sweep.SCHEMES]
  header = (
    "slice", "rho", "eta", "width x layers", "data x fsdp x expert",
    "microbatches", "remat", "headroom, GiB", "compute, s",
    *(f"{name}, s" for name in names), "ratio", "MFU bound", "chip-hours",
  )  # fmt: skip
  totals = readme_lib.table(
    ("slice", "scheme", "shapes planned", "chip-hours of these"), sums
  )
  kept = list(found.values())
  shapes = readme_lib.table(header, lines)
  return f"{shapes}\n\n{totals}\n\n{planned.origin(kept)}"


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


def _line(shape, pair):
  """Of both schemes: headroom is the smaller one, chip-hours the sum."""
  known = [row for row in pair if row]
  first = known[0]
  model = arch_sweep.PAPER_CELLS[shape].model
  seconds = [float(row["step_seconds"]) for row in known]
  cells = [f"{float(row['step_seconds']):.2f}" if row else "" for row in pair]
  whole = len(known) == len(pair)
  ratio = f"{seconds[1] / seconds[0]:.3f}" if whole else ""
  utilisation = ", ".join(f"{float(row['mfu_bound']):.0%}" for row in known)
  return [
    first["slice"], f"{shape[0]:g}", f"{shape[1]:g}",
    f"{model.width} x {model.num_layers}", planned.mesh(first),
    first["microbatches"], first["remat"],
    f"{min(float(row['headroom_GiB']) for row in known):.1f}",
    f"{float(first['compute_seconds']):.2f}", *cells, ratio, utilisation,
    str(sum(int(row["chip_hours"]) for row in known)),
  ]  # fmt: skip


def _sum(slice_name, scheme, known):
  number = f"{len(known)} of {len(_SHAPES)}"
  if len(known) == len(_SHAPES):
    number = "all"
  hours = sum(int(row["chip_hours"]) for row in known)
  return [slice_name, figures.name_of(scheme), number, f"{hours:,}"]
