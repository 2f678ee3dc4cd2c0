# SPDX-License-Identifier: Apache-2.0
"""Writes the figure and the table of the README from committed rows.

  python -m experiments.arch_sweep.publish --adopt=runs/arch_sweep
  python -m experiments.arch_sweep.publish

The first takes over the rows of a finished sweep as results.csv; both draw
heatmaps.svg and fill README.md with what is in it. A test holds them together.
"""

import argparse
from collections.abc import Sequence
import pathlib

from matplotlib import pyplot as plt
import numpy as np

from attnres_jax import csv_rows
from attnres_jax.analysis import plots as style_lib
from attnres_jax.scaling import plots
from experiments.arch_sweep import report
from experiments.pages import adopt
from experiments.pages import page
from experiments.pages import readme as readme_lib

_HERE = pathlib.Path(__file__).parent
RESULTS = _HERE / "results.csv"
README = _HERE / "README.md"
FIGURE = _HERE / "heatmaps.svg"


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description="Fills the README.")
  parser.add_argument("--adopt", metavar="DIR", help="a finished sweep")
  options = parser.parse_args(argv)
  if options.adopt:
    adopt.adopt(options.adopt, RESULTS)
  if RESULTS.exists():
    draw(csv_rows.read(RESULTS))
  README.write_text(filled(README.read_text(encoding="utf-8")))


def filled(readme: str) -> str:
  """`readme` with the table of what is committed."""
  if not RESULTS.exists():
    return readme
  return readme_lib.fill(readme, "results", table(csv_rows.read(RESULTS)))


def draw(rows: Sequence[report.Row]) -> None:
  """Fig. 7, a heatmap per scheme."""
  rhos, etas = report.axes(rows)
  # The same file from the same rows.
  with plt.rc_context({"svg.hashsalt": "heatmaps", "svg.fonttype": "none"}):
    figure = plots.figure_7(
      report.tables(rows, rhos, etas),
      widths_per_layer=rhos,
      heads_per_layer=etas,
    )
    figure.savefig(FIGURE, facecolor="white", metadata={"Date": None})


def table(rows: Sequence[report.Row]) -> str:
  """A line per shape, the best of each scheme in bold; where it is from."""
  rhos, etas = report.axes(rows)
  losses = report.tables(rows, rhos, etas)
  lines = []
  for i, rho in enumerate(rhos):
    for j, eta in enumerate(etas):
      cells = [f"{rho:g}", f"{eta:g}"]
      for found in losses.values():
        text = f"{found[i, j]:.4f}"
        cells.append(f"**{text}**" if found[i, j] == found.min() else text)
      gain = losses[report.OTHER][i, j] - losses[report.BASELINE][i, j]
      lines.append([*cells, page.signed(gain)])
  names = [style_lib.name_of(scheme) for scheme in losses]
  header = ["rho", "eta", *names, "difference"]
  gains = losses[report.OTHER] - losses[report.BASELINE]
  sentence = (
    f"{names[1]} is lower in {int(np.sum(gains < 0))} of {gains.size} shapes;"
    f" differences are {page.signed(gains.min())} to {page.signed(gains.max())}"
    " nats."
  )
  parts = readme_lib.table(header, lines), sentence, adopt.origin(rows)
  return "\n\n".join(parts)


if __name__ == "__main__":
  main()
