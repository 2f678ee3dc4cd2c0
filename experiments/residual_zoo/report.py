# SPDX-License-Identifier: Apache-2.0
"""The table and the figure of the README, from the rows."""

from collections.abc import Mapping, Sequence
import json
import statistics

from matplotlib import figure as figure_lib
import numpy as np

from attnres_jax import figures
from attnres_jax.analysis import plots
from attnres_jax.models import residuals
from experiments.pages import page
from experiments.pages import readme
from experiments.pages import sweep
from experiments.pages import variants
from experiments.residual_zoo import config

Row = Mapping[str, str]


def table(rows: Sequence[Row]) -> str:
  """A line per scheme."""
  lines = [
    [
      figures.name_of(row["scheme"]),
      f"`{row['scheme']}`",
      f"[{row['family']}.py](../../attnres_jax/models/residuals/"
      f"{row['family']}.py)",
      row["source"],
      residuals.RESIDUALS[row["scheme"]].certainty.value,
      f"{int(row['parameters']):,}",
      f"{float(row['flops_share']):.2%}",
      f"{float(row['moved_vectors']):.1f}",
      f"{float(row['state_vectors']):.1f}",
      row["rank"],
      "yes" if row["starts_as_prenorm"] == "True" else "no",
    ]
    for row in rows
  ]
  header = (
    "scheme", "name", "file", "arXiv", "certainty", "parameters", "FLOPs",
    "moved", "state", "rank", "starts as PreNorm",
  )  # fmt: skip
  python, jax, commit = (
    ", ".join(dict.fromkeys(row[name] for row in rows))
    for name in ("python", "jax", "commit")
  )
  origin = f"{len(rows)} schemes; Python {python}, jax {jax}, commit {commit}."
  return f"{readme.table(header, lines)}\n\n{origin}"


def losses(rows: Sequence[Row]) -> str:
  """A line per trained scheme: differences, and what a step cost."""
  every = variants.with_shared(config.STUDY, rows)
  seconds, memory = _step_seconds(every), _step_bytes(every)
  base = seconds[variants.BASELINE]
  lines = []
  found = variants.table(config.STUDY, every)
  labels = {config.STUDY.variants[name].label: name for name in seconds}
  for label, _, *rest in found.rows:
    ratio = statistics.median(
      own / base[seed]
      for seed, own in seconds[labels[str(label)]].items()
      if seed in base
    )
    step_bytes = memory.get(labels[str(label)])
    needed = f"{step_bytes / 1e6:.0f} MB" if step_bytes else ""
    lines.append([label, *rest, f"{ratio:.2f}", needed])
  header = (
    *found.header[:1], *found.header[2:], "time of a step over PreNorm",
    "memory of a step",
  )  # fmt: skip
  table = page.Table(header, lines)
  return f"{table.markdown()}\n\n{sweep.origin(every)}"


def _step_seconds(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
  """Of each variant and seed, at the rate and budget of the study."""
  found: dict[str, dict[int, float]] = {}
  for row in variants.at_own_settings(rows):
    own = found.setdefault(row["variant"], {})
    own[int(row["seed"])] = float(row["step_seconds"])
  return found


def _step_bytes(rows: Sequence[Row]) -> dict[str, int]:
  """Of each variant; seeds, rates and budgets share a step's program."""
  return {
    row["variant"]: int(row["step_bytes"])
    for row in rows
    if row.get("step_bytes")
  }


def differences(
  rows: Sequence[Row], trained: Sequence[Row]
) -> figure_lib.Figure:
  """Differences from PreNorm, the smallest loss first."""
  del rows
  return variants.forest(config.STUDY, trained, in_order=True)


def figure(
  rows: Sequence[Row], trained: Sequence[Row] = ()
) -> figure_lib.Figure:
  """The mixing matrices of all schemes, as norms per pair."""
  del trained
  matrices = {
    row["scheme"]: np.asarray(json.loads(row["norms"])) for row in rows
  }
  return plots.mixing_matrices(matrices, columns=7)
