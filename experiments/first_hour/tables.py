# SPDX-License-Identifier: Apache-2.0
"""The static tables of the kernels, from the committed rows.

Below each table stands where its rows come from, as the rows say.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import functools
import pathlib
from typing import Any

from attnres_jax.common import csv_rows
from attnres_kernels.depth_attention import shapes
from attnres_kernels.kda import shapes as kda_shapes
from experiments.pages import readme

_ROOT = pathlib.Path(__file__).parents[2]

# The page with the tables.
DOCUMENT = "kernels/benchmarks/results/README.md"
CHIPS = "v5e", "v6e", "v5p", "tpu7x"

_FILES = "tpu_static", "kda_static"

Row = Mapping[str, str]

_PASSES = "forward", "backward"
_NO_ROW = "not compiled"
_FAMILIES = {
  "48B (6, 1 / 5 / 9, 8192, 2304)": "48b",
  "Table 2 (4, 1 / 5 / 8, 8192, 1168)": "table2",
  "wide (16, 8, 8192, 8192)": "wide",
  "Kimi K3 (24, 1 / 5 / 8, 8192, 7168)": "kimi_k3",
  "decode (24, 8, 1 / 32 / 128, 7168)": "decode",
  "Full (8, 8 / 32 / 56, 4096, 2304)": "full",
}


@functools.cache
def by_kernel() -> dict[tuple[str, str, str], Row]:
  """The compiled rows of all kernels, by kernel, chip and shape."""
  folder = _ROOT / "kernels/benchmarks/results"
  return {
    (row["kernel"], row["chip"], row["shape"]): row
    for name in _FILES
    for row in csv_rows.read(folder / f"{name}.csv")
  }


def of_depth(_: readme.Rows = ()) -> str:
  """Ratios of the depth operators."""
  lines: list[list[str]] = []
  used: list[Row | None] = []

  def add(kernel, label, shapes_of_line):
    cells = []
    for chip in CHIPS:
      found = [_row(kernel, chip, s) for s in shapes_of_line]
      used.extend(found)
      cells.append(" / ".join(_ratio(row) for row in found))
    lines.append([_name(kernel), label, *cells])

  for line in _attention():
    add(*line)
  for kernel in "depth_merge", "rms_norm":
    for way in _PASSES:
      add(f"{kernel}_{way}", "D = 1168 / 2304 / 8192", shapes.MERGE)
  header = "kernel", "shape (Q, M, T, D)", *CHIPS
  return _with_origin(_merged(header, lines), used)


def of_heads(_: readme.Rows = ()) -> str:
  """Ratios with several heads and with low-rank keys, on v5p."""
  lines: list[list[str]] = []
  used: list[Row | None] = []
  for op, name, shapes_of_line in (
    ("depth_attention", "depth_attention", shapes.HEADS),
    ("depth_merge", "depth_merge_norm", shapes.MERGE_HEADS),
  ):
    for way in _PASSES:
      found = [_row(f"{op}_{way}", "v5p", shape) for shape in shapes_of_line]
      used.extend(found)
      lines.append([f"{name} {way}", *map(_ratio, found)])
  header = (
    "kernel, v5p", "one head", "H = 16, slices of 128 columns",
    "H = 64, slices of 32", "(6, 9, 8192, 2304), H = 16, slices of 144",
    "R = 64",
  )  # fmt: skip
  return _with_origin(readme.table(header, lines), used)


def of_kda(_: readme.Rows = ()) -> str:
  """Memory time, schedule time, ratio and fullest slot of KDA's kernels."""
  labels = {
    "48b": "48B (1, 8192, 32, 128, 128)",
    "table2": "Table 2 (4, 4096, 12, 128, 128)",
  }
  kernels = {
    "kda_forward": "forward",
    "kda_forward_saving": "forward, saving",
    "kda_backward": "backward",
    "short_conv_forward": "short_conv, forward",
    "short_conv_backward": "short_conv, backward",
  }
  chips = "v5e", "v5p", "v6e", "tpu7x", "v4"
  lines: list[list[str]] = []
  used: list[Row | None] = []
  for kernel, words in kernels.items():
    for shape in kda_shapes.NAMED:
      found = [_row(kernel, chip, shape) for chip in chips]
      used.extend(found)
      lines.append([words, labels[shape.name], *map(_whole_cell, found)])
  header = "kernel", "shape (B, T, H, K, V)", *chips
  return _with_origin(_merged(header, lines), used)


def of_hour(rows: readme.Rows) -> str:
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
    if row not in checks and not row["name"].endswith("over PreNorm"):
      spread = f" ({row['low']} to {row['high']})" if row["low"] else ""
      names = row["name"] * (row["name"] != "step"), row["arm"]
      what = ", ".join(filter(None, names))
      measured = f"{row['measured']} {row['unit']}{spread}"
      lines.append([what, row["case"], measured])
  table = readme.table(["what", "case", "measured"], lines)
  return readme.with_origin(f"{' '.join(parts)}\n\n{table}", rows)


def of_gpu(_: readme.Rows = ()) -> str:
  """Medians of reads on a GPU, in milliseconds."""
  rows = csv_rows.read(_ROOT / "kernels/benchmarks/results/gpu.csv")
  arms = list(dict.fromkeys(row["arm"] for row in rows))
  found: dict[tuple[str, ...], dict[str, str]] = {}
  for row in rows:
    cell = row["median_ms"] or ("off" if row["status"] == "failed" else "")
    key = row["hardware"], row["shape"], row["mode"]
    found.setdefault(key, {})[row["arm"]] = cell
  lines = [
    [*key, *(own.get(arm, "") for arm in arms)] for key, own in found.items()
  ]
  header = ["", "queries, sources, tokens, width", "", *arms]
  table = _merged(header, lines)
  return readme.with_origin(table, rows)


PLACES = {
  "gpu": of_gpu,
  "static": of_depth,
  "heads": of_heads,
  "kda": of_kda,
}


def _attention() -> Iterator[tuple[str, str, list[Any]]]:
  """(kernel, label, shapes) of each line of depth attention."""
  for way in _PASSES:
    for label, family in _FAMILIES.items():
      found = [shape for shape in shapes.TABLE if shape.name == family]
      yield f"depth_attention_{way}", label, found


def _name(kernel: str) -> str:
  """The operator of a kernel, and its direction."""
  operator, _, way = kernel.rpartition("_")
  return f"{operator.replace('depth_merge', 'depth_merge_norm')} {way}"


def _row(kernel: str, chip: str, shape: Any) -> Row | None:
  return by_kernel().get((kernel, chip, str(shape)))


def _ratio(row: Row | None) -> str:
  return _NO_ROW if row is None else row["ratio"]


def _times(row: Row | None) -> str:
  if row is None:
    return _NO_ROW
  schedule, memory = float(row["schedule_us"]), float(row["hbm_us"])
  return f"{row['ratio']} ({schedule:,.0f} / {memory:,.0f})"


def _whole_cell(row: Row | None) -> str:
  if row is None:
    return _NO_ROW
  memory, schedule = float(row["hbm_us"]), float(row["schedule_us"])
  slot = f"{row['limiting_slot']} {row['slot_use']}"
  return f"{memory:.0f}, {schedule:.0f}, {row['ratio']}, {slot}"


def _merged(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
  """A table whose first cell is empty where it repeats the one above."""
  shown, last = [], None
  for first, *rest in lines:
    shown.append(["" if first == last else first, *rest])
    last = first
  return readme.table(header, shown)


def _with_origin(table: str, used: Iterable[Row | None]) -> str:
  return readme.with_origin(table, [row for row in used if row is not None])
