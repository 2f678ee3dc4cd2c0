# SPDX-License-Identifier: Apache-2.0
"""The table and the sentence of READMEs, from the rows of `step_cost`."""

from collections.abc import Mapping, Sequence

from attnres_jax import config as config_lib
from attnres_jax.analysis import figures
from experiments.pages import readme as readme_lib

# The forms of PreNorm that are measured.
BASELINES = ("prenorm", "prenorm unrolled")
MEASURES = ("forward", "forward_backward", "compile_train_step")

Row = Mapping[str, str]


def table(rows: Sequence[Row]) -> str:
  """Ratios with their ranges, a line per size and scheme.

  Raises:
    ConfigError: the rows are from before both forms of PreNorm were measured.
  """
  if "baseline" not in rows[0]:
    raise config_lib.ConfigError(
      "results.csv: has no column baseline; measure again with"
      " python -m experiments.step_cost.run"
    )
  lines = []
  for size, scheme in dict.fromkeys((r["size"], r["scheme"]) for r in rows):
    found = [_find(rows, size, scheme, kind) for kind in MEASURES]
    lines.append([size, label(scheme), *map(_cell, found)])
  header = (
    "size", "scheme", "forward", "forward + backward",
    "compiling the training step",
  )  # fmt: skip
  return f"{readme_lib.table(header, lines)}\n\n{_origin(rows)}."


def sentence(rows: Sequence[Row]) -> str:
  """What Block and Full cost at the larger size."""
  block, full = (
    _find(rows, "large", scheme, "forward_backward")
    for scheme in ("block_attnres", "full_attnres")
  )
  return (
    "**Cost.** On a CPU, a forward and backward pass of Block AttnRes takes"
    f" {_times(block)} times as long as PreNorm's in its faster form. Full"
    f" AttnRes takes {_times(full)} times as long."
    " [How it was measured](experiments/step_cost/README.md)."
  )


def pytorch(rows: Sequence[Row]) -> str:
  """Ours beside eager PyTorch, a line per scheme."""
  lines = [
    [
      label(row["scheme"]),
      f"{float(row['seconds']):.2f} s",
      f"{float(row['torch_seconds']):.2f} s",
      f"{float(row['ratio']):.2f} ({float(row['ratio_min']):.2f} to"
      f" {float(row['ratio_max']):.2f})",
      f"{float(row['cpu_ratio']):.2f}",
    ]
    for row in rows
  ]
  header = (
    "scheme", "ours", "PyTorch", "ours over PyTorch", "in processor time",
  )  # fmt: skip
  versions = ", ".join(sorted({row["torch"] for row in rows}))
  return (
    f"{readme_lib.table(header, lines)}\n\n{_origin(rows)}; PyTorch {versions}."
  )


def label(scheme: str) -> str:
  """The label of a scheme of the rows."""
  name, _, form = scheme.partition(" ")
  details = {
    "": "",
    "unrolled": ", unrolled",
    "one_softmax": ", one softmax per sublayer",
    "depth_scan": ", a scan over depth",
  }
  scanned = ", scanned" if name in ("prenorm", "rescaled") and not form else ""
  return figures.name_of(name) + (details[form] or scanned)


def _find(rows: Sequence[Row], size: str, scheme: str, measure: str) -> Row:
  wanted = {"size": size, "scheme": scheme, "measure": measure}
  (row,) = (row for row in rows if wanted.items() <= row.items())
  return row


def _cell(row: Row) -> str:
  if row["scheme"] == row["baseline"]:
    return f"1 ({float(row['seconds']):.2f} s)"
  if row["ratio_min"] == row["ratio_max"]:
    return f"{float(row['ratio']):.1f}"
  return _times(row)


def _times(row: Row) -> str:
  value, low, high = (
    f"{float(row[name]):.2f}" for name in ("ratio", "ratio_min", "ratio_max")
  )
  return f"{value} ({low} to {high})"


def _origin(rows: Sequence[Row]) -> str:
  row = rows[0]
  return (
    f"{row['hardware']}, Python {row['python']}, jax {row['jax']}, commit"
    f" {row['commit']}"
  )
