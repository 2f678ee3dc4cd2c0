# SPDX-License-Identifier: Apache-2.0
"""Writes the figure and the tables of the README from committed rows.

  python -m experiments.scaling_law.publish --adopt=runs/scaling \
    --adopt_rates=runs/scaling_lr
  python -m experiments.scaling_law.publish

The first takes over the rows of finished sweeps, as results.csv and
learning_rates.csv; both draw laws.svg and fill README.md with what is in these
files. A test holds them together.
"""

import argparse
from collections.abc import Sequence
import pathlib
import statistics

from matplotlib import pyplot as plt

from attnres_jax import csv_rows
from attnres_jax.analysis import plots
from attnres_jax.scaling import fit as fit_lib
from experiments.pages import adopt
from experiments.pages import page
from experiments.pages import readme as readme_lib
from experiments.scaling_law import figures
from experiments.scaling_law import report

_HERE = pathlib.Path(__file__).parent
RESULTS = _HERE / "results.csv"
RATES = _HERE / "learning_rates.csv"
README = _HERE / "README.md"
FIGURE = _HERE / "laws.svg"


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description="Fills the README.")
  parser.add_argument("--adopt", metavar="DIR", help="a finished sweep")
  parser.add_argument(
    "--adopt_rates", metavar="DIR", help="a finished sweep over learning rates"
  )
  options = parser.parse_args(argv)
  for folder, path in ((options.adopt, RESULTS), (options.adopt_rates, RATES)):
    if folder:
      adopt.adopt(folder, path)
  if RESULTS.exists():
    draw(csv_rows.read(RESULTS))
  README.write_text(filled(README.read_text(encoding="utf-8")))


def filled(readme: str) -> str:
  """`readme` with the tables of what is committed."""
  if RATES.exists():
    rates = learning_rates(csv_rows.read(RATES))
    readme = readme_lib.fill(readme, "rates", rates)
  if RESULTS.exists():
    readme = readme_lib.fill(readme, "results", tables(csv_rows.read(RESULTS)))
  return readme


def draw(rows: Sequence[report.Row]) -> None:
  """Figure 4, ours beside the paper's."""
  runs, found = report.fits(rows, report.COUNTING)
  # The same file from the same rows.
  with plt.rc_context({"svg.hashsalt": "laws", "svg.fonttype": "none"}):
    figure = figures.laws(runs, found, report.COUNTING)
    figure.savefig(FIGURE, facecolor="white", metadata={"Date": None})


def tables(rows: Sequence[report.Row]) -> str:
  """Losses by size and scheme, laws and advantages, and where they are from."""
  parts = [_losses(rows), _control(rows), _laws(rows), adopt.origin(rows)]
  return "\n\n".join(part for part in parts if part)


def learning_rates(rows: Sequence[report.Row]) -> str:
  """A line per size, a column per rate; the best of a size is bold."""
  rates = sorted({float(row[report.RATE]) for row in rows})
  lines = []
  for label, own in report.by_size(rows).items():
    found = {
      float(row[report.RATE]): float(row["validation_loss"]) for row in own
    }
    best = min(found.values())
    cells = [
      f"**{found[rate]:.4f}**" if found[rate] == best else f"{found[rate]:.4f}"
      for rate in rates
    ]
    lines.append([label, *cells])
  header = ["size"] + [f"{rate:g}" for rate in rates]
  return f"{readme_lib.table(header, lines)}\n\n{adopt.origin(rows)}"


def _losses(rows: Sequence[report.Row]) -> str:
  schemes = list(dict.fromkeys(row["residual"] for row in rows))
  lines = []
  for label, own in report.by_size(rows).items():
    cells = [label, f"{int(own[0]['active_params']):,}"]
    cells += [_cell(own, scheme) for scheme in schemes]
    lines.append(cells)
  header = ["size", "N"] + [plots.name_of(scheme) for scheme in schemes]
  return readme_lib.table(header, lines)


def _cell(rows: Sequence[report.Row], scheme: str) -> str:
  """Mean and spread over seeds, and what separates it from the baseline."""
  losses = report.losses_of(rows, scheme)
  if not losses:
    return ""
  text = f"{statistics.fmean(losses):.4f}"
  if len(losses) > 1:
    text += f" ± {statistics.stdev(losses):.4f}"
  if scheme != figures.BASELINE:
    apart = report.differences(rows, scheme)
    text += f" (**{page.signed(statistics.fmean(apart))}**"
    if len(apart) > 1:
      text += f" ± {statistics.stdev(apart):.4f}"
    text += ")"
  return text


def _control(rows: Sequence[report.Row]) -> str:
  sentences = []
  for label, own in report.by_size(rows).items():
    apart = report.differences(own, "rescaled")
    if apart:
      seeds = ", ".join(page.signed(one) for one in apart)
      sentences.append(
        f"Difference of Rescaled from PreNorm at size {label}, by seed:"
        f" {seeds}."
      )
  return " ".join(sentences)


def _laws(rows: Sequence[report.Row]) -> str:
  lines = []
  for scheme, counting, fit, ratio in report.advantages(rows):
    lines.append(
      [
        plots.name_of(scheme),
        report.COUNTS[counting].replace("and", "+"),
        _interval(fit.coefficient(), 3),
        _interval(fit.exponent(), 4),
        "" if ratio is None else _interval(ratio, 2),
      ]
    )
  header = ["residual", "C counts", "A", "alpha", "PreNorm's C for its loss"]
  return readme_lib.table(header, lines)


def _interval(estimate: fit_lib.Estimate, digits: int) -> str:
  text = f"{estimate.value:.{digits}f}"
  if estimate.low is None:
    return text
  return f"{text} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"


if __name__ == "__main__":
  main()
