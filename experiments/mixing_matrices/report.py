# SPDX-License-Identifier: Apache-2.0
"""Numbers and the page of matrices, from the rows."""

from collections.abc import Iterator, Mapping, Sequence
import json

from matplotlib import figure as figure_lib
import numpy as np

from attnres_jax.analysis import plots
from experiments import trained
from experiments.ablations import config as ablations
from experiments.pages import page

VARIANTS = tuple(name for name in ablations.STUDY.variants if name != "control")

Row = Mapping[str, str]


def results(rows: Sequence[Row]) -> str:
  """For the README: means over seeds of what describes a matrix."""
  lines = []
  for variant, matrices in by_variant(rows).items():
    ranks = sorted(
      {row["rank"] for row in rows if row["variant"] == variant}, key=int
    )
    measured = [list(_numbers(matrix)) for matrix in matrices]
    cells = [f"{x:.2f}" for x in np.mean(measured, axis=0)]
    lines.append(
      [trained.label(variant), *cells, " or ".join(ranks), str(len(matrices))]
    )
  header = (
    "residual", "share of the newest", "share of the embedding", "reach",
    "overlap with an even mixture", "rank", "networks",
  )  # fmt: skip
  return f"{page.Table(header, lines).markdown()}\n\n{trained.origin(rows)}"


def figure(rows: Sequence[Row]) -> figure_lib.Figure:
  """A matrix per variant, of its first seed."""
  first = {
    trained.label(variant): matrices[0]
    for variant, matrices in by_variant(rows).items()
  }
  return plots.mixing_matrices(first, columns=4)


def by_variant(rows: Sequence[Row]) -> dict[str, list[np.ndarray]]:
  """The matrices of every network, in the order of the study."""
  found: dict[str, list[np.ndarray]] = {}
  for row in rows:
    matrix = np.asarray(json.loads(row["matrix"]))
    found.setdefault(row["variant"], []).append(matrix)
  return {name: found[name] for name in VARIANTS if name in found}


def _numbers(matrix: np.ndarray) -> Iterator[float]:
  """Means over reads of at least three values, of shares of absolute weight.

  The share of the newest value, and the embedding's. The reach, which is the
  mean distance of a read (1 for the newest) over an even mixture's. The overlap
  with an even mixture, which PreNorm reads up to scale: 1 minus half the sum of
  absolute differences.
  """
  size = len(matrix)
  rows = np.arange(2, size)
  share = np.abs(matrix) / np.abs(matrix).sum(axis=1, keepdims=True)
  yield float(np.mean(share[rows, rows]))
  yield float(np.mean(share[rows, 0]))
  distance = rows[:, None] - np.arange(size)[None] + 1.0
  visible = distance > 0
  reach = np.sum(np.where(visible, share[rows] * distance, 0.0), axis=1)
  yield float(np.mean(reach / ((rows + 2.0) / 2)))
  even = np.where(visible, 1.0 / (rows[:, None] + 1.0), 0.0)
  yield float(np.mean(1 - np.abs(share[rows] - even).sum(axis=1) / 2))
