# SPDX-License-Identifier: Apache-2.0
"""The table and the figure of the README, from the rows."""

from collections.abc import Mapping, Sequence
import functools
import json
import pathlib

from matplotlib import figure as figure_lib
import numpy as np

from attnres_jax.analysis import figures
from attnres_jax.analysis import plots
from attnres_jax.common import csv_rows
from attnres_jax.models import residuals
from attnres_jax.sweep.pages import page
from attnres_jax.sweep.pages import sweep_page
from experiments.pages import readme
from experiments.pages import variants
from experiments.residual_zoo import config

Row = Mapping[str, str]
_COSTS = pathlib.Path(__file__).absolute().parents[1] / "cost/results.csv"


def table(rows: Sequence[Row]) -> str:
  """A line per scheme."""
  families = "../../attnres_jax/models/residuals"
  columns = {
    "scheme": lambda row: figures.name_of(row["scheme"]),
    "name": lambda row: f"`{row['scheme']}`",
    "file": lambda row: f"[{row['family']}.py]({families}/{row['family']}.py)",
    "arXiv": "source",
    "certainty": lambda row: residuals.RESIDUALS[row["scheme"]].certainty.value,
    "parameters": lambda row: f"{int(row['parameters']):,}",
    "FLOPs": lambda row: f"{float(row['flops_share']):.2%}",
    "moved": lambda row: f"{float(row['moved_vectors']):.1f}",
    "state": lambda row: f"{float(row['state_vectors']):.1f}",
    "rank": "rank",
    "starts as PreNorm": lambda row: (
      "yes" if row["starts_as_prenorm"] == "True" else "no"
    ),
  }
  return readme.text(page.Table.of(rows, columns), readme.origin(rows))


def losses(rows: Sequence[Row]) -> str:
  """A line per trained scheme: differences, memory and time of a step."""
  compared = variants.compare(config.STUDY, rows)
  # Seeds, rates and budgets of a variant share a program.
  memory = {
    row["variant"]: f"{int(row['step_bytes']) / 1e6:.0f} MB"
    for row in compared.rows
    if row.get("step_bytes")
  }
  # Both passes of the network that is trained here.
  timed = [
    row
    for row in csv_rows.read(_COSTS)
    if (row["program"], row["network"]) == ("forward_backward", "paired")
    and row["arm"] in config.NAMES
  ]
  times = {
    config.NAMES[row["arm"]]: f"{float(row['cpu_ratio']):.2f}" for row in timed
  }
  zoo = variants.table(compared)
  names = {v.label: name for name, v in config.STUDY.variants.items()}
  lines = [
    [label, *rest, memory.get(names[str(label)], ""),
     times.get(names[str(label)], "")]
    for label, _, *rest in zoo.rows
  ]  # fmt: skip
  header = (*zoo.header[:1], *zoo.header[2:], "memory of a step", "time")
  return readme.text(
    page.Table(header, lines),
    variants.twice(compared),
    f"{readme.origin(compared.rows, runs=True)} Times: {readme.origin(timed)}",
  )


def figure(rows: Sequence[Row]) -> figure_lib.Figure:
  """The mixing matrices of all schemes, as norms per pair."""
  matrices = {
    row["scheme"]: np.asarray(json.loads(row["norms"])) for row in rows
  }
  return plots.mixing_matrices(matrices, columns=6)


# Differences from PreNorm, the smallest loss first.
differences = functools.partial(variants.forest, config.STUDY, in_order=True)
PUBLISHED = readme.Published(
  __file__,
  [
    readme.Part(table),
    readme.Part(losses, "losses", "trained"),
    readme.Part(figure, document="matrices.svg"),
    readme.Part(differences, rows="trained", document="differences.svg"),
  ],
  functools.partial(
    sweep_page.render, answer=functools.partial(variants.answer, config.STUDY)
  ),
)
