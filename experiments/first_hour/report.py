# SPDX-License-Identifier: Apache-2.0
"""Tables of committed rows: devices that ran, kernels that were compiled."""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

from attnres_jax.sweep.pages import page
from attnres_kernels.depth_attention import shapes
from attnres_kernels.kda import shapes as kda_shapes
from experiments.pages import readme

_RESULTS = "../../kernels/benchmarks/results"
_CHIPS = "v5e", "v6e", "v5p", "tpu7x"
_WAYS = "forward", "backward"
Line = tuple[str, str, Sequence[Any]]


def compiled(
  chips: Sequence[str], cell: str, lines: Sequence[Line], rows: readme.Rows
) -> str:
  """Kernels of a static table, a column per chip.

  A cell is a format of a row. Lines are (kernel, label of its shapes, shapes),
  and rows are found by kernel, chip and shape.
  """
  keyed = {(row["kernel"], row["chip"], row["shape"]): row for row in rows}
  used, written, last = [], [], ""
  for kernel, label, several in lines:
    cells = []
    for chip in chips:
      line = [keyed[kernel, chip, str(shape)] for shape in several]
      used += line
      cells.append(" / ".join(_written(cell, row) for row in line))
    written.append([kernel * (kernel != last), label, *cells])
    last = kernel
  table = page.Table(["kernel", "shape", *chips], written)
  return readme.text(table, readme.origin(used))


def of_device(rows: readme.Rows) -> str:
  """What one device measured; its checks as a count."""
  checks = [row for row in rows if row["task"].startswith("check ")]
  failed = [row for row in checks if row["status"] == "failed"]
  parts = [f"{len(checks) - len(failed)} of {len(checks)} checks passed."]
  parts += [
    f"Failed: {row['case']} ({row['arm']}), off by {float(row['measured']):.1e}"
    f" where {float(row['limit']):.0e} is allowed."
    for row in failed
  ]
  lines = []
  for row in rows:
    # Cotangents were computed inside the timed loop: not times of operators.
    wrong = row["task"].startswith("depth_attention backward")
    if row in checks or row["name"].endswith("over PreNorm") or wrong:
      continue
    spread = f" ({row['low']} to {row['high']})" if row["low"] else ""
    what = [row["name"] * (row["name"] != "step"), row["arm"]]
    measured = f"{row['measured']} {row['unit']}{spread}"
    lines.append([", ".join(filter(None, what)), row["case"], measured])
  table = page.Table(["what", "case", "measured"], lines)
  return readme.text(" ".join(parts), table, readme.origin(rows))


def of_reads(rows: readme.Rows) -> str:
  """Medians of reads on a GPU, in milliseconds, by arm."""
  cells = (
    (
      row["hardware"], row["shape"], row["mode"], row["arm"],
      row["median_ms"] or "off" * (row["status"] == "failed"),
    )
    for row in rows
  )  # fmt: skip
  header = ["", "queries, sources, tokens, width", ""]
  return readme.text(page.Table.across(header, cells), readme.origin(rows))


def of_gpu_kernels(rows: readme.Rows) -> str:
  """GPU kernels as the compiler made them, both passes of each shape."""
  cells = (
    (
      row["operator"], f"{row['queries']}, {row['sources']}, {row['width']}",
      row["pass"], f"{row['launches']}, {row['GB']}"
      f" ({float(row['GB']) / float(row['least_GB']):.2f}), {row['registers']},"
      f" {row['barriers']}",
    )
    for row in rows
  )  # fmt: skip
  table = page.Table.across(["kernel", "Q, M, D"], cells)
  return readme.text(table, readme.origin(rows))


def _written(cell: str, row: Mapping[str, str]) -> str:
  numbers = {n: float(row[n]) for n in ("schedule_us", "hbm_us") if n in row}
  return cell.format(**dict(row) | numbers)


def _depth() -> list[Line]:
  families: dict[str, list[Any]] = {}
  for shape in shapes.TABLE:
    families.setdefault(shape.name, []).append(shape)
  lines: list[Line] = []
  for way in _WAYS:
    for name, several in families.items():
      sizes = zip(*((x.queries, x.sources, x.tokens, x.width) for x in several))
      words = (" / ".join(map(str, dict.fromkeys(each))) for each in sizes)
      label = f"{name} ({', '.join(words)})"
      lines.append((f"depth_attention_{way}", label, several))
  for kernel in ("depth_merge", "rms_norm"):
    for way in _WAYS:
      label = "D = 1168 / 2304 / 8192"
      lines.append((f"{kernel}_{way}", label, shapes.MERGE))
  return lines


def _heads() -> list[Line]:
  label = "one head / H = 16 / H = 64 / D = 2304, H = 16 / R = 64"
  groups = {"attention": shapes.HEADS, "merge": shapes.MERGE_HEADS}
  return [
    (f"depth_{name}_{way}", label, several)
    for name, several in groups.items()
    for way in _WAYS
  ]


def _of_shapes(kernels: Sequence[str], several: Sequence[Any]) -> list[Line]:
  return [(name, str(shape), [shape]) for name in kernels for shape in several]


def _part(name: str, file: str, make: Any, *table: Any) -> readme.Part:
  make = functools.partial(make, *table)
  return readme.Part(make, name, f"{_RESULTS}/{file}", f"{_RESULTS}/README.md")


_KDA = [
  "kda_forward", "kda_forward_saving", "kda_backward", "short_conv_forward",
  "short_conv_backward",
]  # fmt: skip
_SLOTS = "{hbm_us:.0f}, {schedule_us:.0f}, {ratio}, {limiting_slot} {slot_use}"
PUBLISHED = readme.Published(__file__, [
  _part("gpu", "gpu", of_reads),
  _part("gpu_static", "gpu_static", of_gpu_kernels),
  _part("static", "tpu_static", compiled, _CHIPS, "{ratio}", _depth()),
  _part("heads", "tpu_static", compiled, ["v5p"], "{ratio}", _heads()),
  _part("kda", "kda_static", compiled, (*_CHIPS, "v4"), _SLOTS,
        _of_shapes(_KDA, kda_shapes.NAMED)),
  *(readme.Part(of_device, name, name) for name in ("h100", "h200")),
])  # fmt: skip
