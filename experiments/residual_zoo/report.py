# SPDX-License-Identifier: Apache-2.0
"""The table and the figure of the README, from the rows."""

from collections.abc import Mapping, Sequence
import json

from matplotlib import figure as figure_lib
import numpy as np

from attnres_jax import figures
from attnres_jax.analysis import plots
from experiments.pages import readme

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
    "scheme", "name", "file", "arXiv", "parameters", "FLOPs", "moved",
    "state", "rank", "starts as PreNorm",
  )  # fmt: skip
  python, jax, commit = (
    ", ".join(dict.fromkeys(row[name] for row in rows))
    for name in ("python", "jax", "commit")
  )
  origin = f"{len(rows)} schemes; Python {python}, jax {jax}, commit {commit}."
  return f"{readme.table(header, lines)}\n\n{origin}"


def figure(rows: Sequence[Row]) -> figure_lib.Figure:
  """The mixing matrices of all schemes, as norms per pair."""
  matrices = {
    row["scheme"]: np.asarray(json.loads(row["norms"])) for row in rows
  }
  return plots.mixing_matrices(matrices, columns=7)
