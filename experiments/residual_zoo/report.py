# SPDX-License-Identifier: Apache-2.0
"""The table and the figure of the README, from the rows."""

from collections.abc import Mapping, Sequence
import json
import pathlib

from matplotlib import figure as figure_lib
import numpy as np

from attnres_jax.analysis import figures
from attnres_jax.analysis import plots
from attnres_jax.common import csv_rows
from attnres_jax.models import residuals
from attnres_jax.sweep.pages import page
from experiments.pages import readme
from experiments.pages import variants
from experiments.residual_zoo import config

Row = Mapping[str, str]
_COSTS = pathlib.Path(__file__).absolute().parents[1] / "cost/results.csv"


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
  return readme.text(page.Table(header, lines), readme.origin(rows))


def losses(rows: Sequence[Row]) -> str:
  """A line per trained scheme: differences, memory and time of a step."""
  every = variants.with_shared(config.STUDY, rows)
  memory, timed = _step_bytes(every), _timed()
  times = {
    config.NAMES[row["arm"]]: f"{float(row['cpu_ratio']):.2f}" for row in timed
  }
  lines = []
  zoo = variants.table(config.STUDY, every)
  names = {v.label: name for name, v in config.STUDY.variants.items()}
  for label, _, *rest in zoo.rows:
    name = names[str(label)]
    step_bytes = memory.get(name)
    needed = f"{step_bytes / 1e6:.0f} MB" if step_bytes else ""
    lines.append([label, *rest, needed, times.get(name, "")])
  header = (*zoo.header[:1], *zoo.header[2:], "memory of a step", "time")
  return readme.text(
    page.Table(header, lines),
    variants.twice(config.STUDY, every),
    f"{readme.origin(every, runs=True)} Times: {readme.origin(timed)}",
  )


def _step_bytes(rows: Sequence[Row]) -> dict[str, int]:
  """A step's bytes by variant; seeds, rates and budgets share its program."""
  return {
    row["variant"]: int(row["step_bytes"])
    for row in rows
    if row.get("step_bytes")
  }


def _timed() -> list[Row]:
  """Rows of cost: both passes of the network that is trained here."""
  return [
    row
    for row in csv_rows.read(_COSTS)
    if (row["program"], row["network"]) == ("forward_backward", "paired")
    and row["arm"] in config.NAMES
  ]


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
  return plots.mixing_matrices(matrices, columns=6)
