# SPDX-License-Identifier: Apache-2.0
"""The report of a sweep, finished or under way: one self-contained page."""

from collections.abc import Iterator, Mapping, Sequence
import html
import pathlib
import statistics
import time
from typing import Any

from etils import epath
import numpy as np

from attnres_jax.scaling import compute as compute_lib
from attnres_jax.scaling import fit as fit_lib
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import monitor
from attnres_jax.sweep import rows as rows_lib
from experiments.pages import page
from experiments.pages import runs as runs_lib
from experiments.pages import svg
from experiments.scaling_law import figures

_BODY = pathlib.Path(__file__).with_name("report_page.html")
_RATES_BODY = pathlib.Path(__file__).with_name("learning_rates.html")
RATE = "optim.peak_lr"
# What the figure counts: the paper's compute most likely has attention in it.
COUNTING = "attention"
COUNTS = {
  "6nd": "6ND",
  "attention": "and attention",
  "residual": "and depth attention",
}
_DRAWS = 500

Row = Mapping[str, Any]


def render(folder: epath.Path, progress: Sequence[monitor.Progress]) -> str:
  """The page, as far as runs are done; it reloads itself until all are."""
  rows = monitor.rows(progress)
  runs = [one.run for one in progress if one.run is not None]
  common = {
    "summary": runs_lib.summary(progress),
    "runs": runs_lib.table(progress),
  }
  refresh = runs_lib.refresh(progress)
  if any(RATE in run.overrides for run in runs):
    parts = common | {"losses": learning_rates(rows)}
    return page.render(
      "Learning rates", _RATES_BODY, parts, refresh_seconds=refresh
    )
  with svg.style():
    parts = common | {
      "laws": laws(rows),
      "losses": losses(rows),
      "control": control(rows),
      "curves": _curves(progress),
      "goodput": goodput(progress),
      "facts": page.facts(_facts(folder, rows)),
    }
  return page.render("Loss over compute", _BODY, parts, refresh_seconds=refresh)


def fits(
  rows: Sequence[Row], counting: str
) -> tuple[dict[str, fit_lib.Runs], dict[str, fit_lib.Fit]]:
  """Runs by scheme, and the laws of those with two sizes or more."""
  runs = rows_lib.by_scheme(rows, counting)
  enough = {
    scheme: own
    for scheme, own in runs.items()
    if len(set(own.compute.tolist())) > 1
  }
  rng = np.random.default_rng(0)
  return runs, fit_lib.fit_schemes(enough, rng, num_samples=_DRAWS)


def advantages(
  rows: Sequence[Row],
) -> Iterator[tuple[str, str, fit_lib.Fit, fit_lib.Estimate | None]]:
  """Scheme, counting, law, and the baseline's compute for the same loss.

  The last is a multiple of the compute of the scheme's largest run, and None
  for the baseline or without one.
  """
  for counting in compute_lib.COUNTINGS:
    runs, found = fits(rows, counting)
    baseline = found.get(figures.BASELINE)
    for scheme, fit in found.items():
      ratio = None
      if baseline is not None and scheme != figures.BASELINE:
        largest = float(runs[scheme].compute.max())
        ratio = fit_lib.compute_advantage(baseline, fit, largest)
      yield scheme, counting, fit, ratio


def laws(rows: Sequence[Row]) -> str:
  """Figure 4, and a table of what was fitted under every counting."""
  runs, found = fits(rows, COUNTING)
  if not found:
    return "<p>Laws appear once a scheme has finished at two sizes.</p>"
  figure = svg.to_svg(figures.laws(runs, found, COUNTING), "laws")
  table = [
    (
      page.scheme(scheme), COUNTS[counting],
      _interval(fit.coefficient(), 3), _interval(fit.exponent(), 4),
      "" if ratio is None else _interval(ratio, 2),
    )
    for scheme, counting, fit, ratio in advantages(rows)
  ]  # fmt: skip
  header = (
    "Residual", "C counts", "A", "&alpha;",
    "PreNorm's C for<br>the same loss",
  )  # fmt: skip
  return (
    f"<figure>{figure}</figure>\n{page.table(header, table)}\n"
    '<p class="note">L = A C<sup>&minus;&alpha;</sup>, least squares in ln L, C'
    " in PFLOP/s-days; no irreducible loss, as in the paper. Small print and"
    f" bands: 90 % of {_DRAWS} bootstrap draws over sizes and seeds, the same"
    " draws for all schemes. Losses of other data and tokenizers do not compare"
    " with the paper's, slopes and gaps do. The last column is how many times"
    " the compute of the scheme's largest run PreNorm needs for its loss; the"
    " paper has 1.25 for Block AttnRes at 5.6 PFLOP/s-days.</p>"
  )


def losses(rows: Sequence[Row]) -> str:
  """A table like the paper's Table 2: a line per size, a column per scheme."""
  schemes = list(dict.fromkeys(row["residual"] for row in rows))
  table = []
  for label, own in by_size(rows).items():
    first = own[0]
    cells = [
      html.escape(label), f"{first['active_params']:,}",
      f"{first['tokens'] / 1e6:.2f}M", f"{first['peak_lr']:g}",
    ]  # fmt: skip
    cells += [_cell(own, scheme) for scheme in schemes]
    table.append(cells)
  header = ["Size", "N", "Tokens", "Rate"]
  return page.table(header + [page.scheme(name) for name in schemes], table)


def control(rows: Sequence[Row]) -> str:
  """What Rescaled says about noise; empty where it was not trained."""
  sentences = []
  for label, own in by_size(rows).items():
    apart = differences(own, "rescaled")
    if apart:
      between = losses_of(own, figures.BASELINE)
      spread = max(between) - min(between) if len(between) > 1 else 0.0
      sentences.append(
        f"At size {html.escape(label)} Rescaled ends"
        f" {page.signed(statistics.fmean(apart))} nats from PreNorm (by seed:"
        f" {', '.join(map(page.signed, apart))}); PreNorm's seeds lie within"
        f" {spread:.4f}."
      )
  return "".join(f"<p>{sentence}</p>" for sentence in sentences)


def learning_rates(rows: Sequence[Row]) -> str:
  """A line per size, a column per rate; the best of a size is marked."""
  rates = sorted({float(row["peak_lr"]) for row in rows})
  table = []
  for label, own in by_size(rows).items():
    found = {
      float(row["peak_lr"]): float(row["validation_loss"]) for row in own
    }
    best = min(found.values())
    cells = []
    for rate in rates:
      text = f"{found[rate]:.4f}" if rate in found else ""
      cells.append(f"<b>{text}</b>" if found.get(rate) == best else text)
    table.append([html.escape(label), *cells])
  return page.table(["Size"] + [f"{rate:g}" for rate in rates], table)


def goodput(progress: Sequence[monitor.Progress]) -> str:
  """Where the time of every scheme went, and of all together."""
  schemes = list(dict.fromkeys(one.residual for one in progress))
  groups = {
    page.scheme(scheme): [one for one in progress if one.residual == scheme]
    for scheme in filter(None, schemes)
  }
  groups["<b>all</b>"] = list(progress)
  columns = []
  for own in groups.values():
    spent = own[0].goodput
    for one in own[1:]:
      spent += one.goodput
    total = sum(one.seconds for one in own)
    seconds = spent.seconds | {"other": max(0.0, total - spent.total)}
    cells = {name: _share(value, total) for name, value in seconds.items()}
    columns.append(cells | {"<b>total</b>": monitor.duration(total)})
  table = [
    [name.replace("_", " "), *(column[name] for column in columns)]
    for name in columns[0]
  ]
  steps = sum(one.goodput.lost_steps for one in progress)
  return (
    page.table(["", *groups], table)
    + f"\n<p>{steps:,} steps were taken twice.</p>"
  )


def _curves(progress: Sequence[monitor.Progress]) -> str:
  found = []
  for one in progress:
    if one.run is not None and one.curve:
      config = folder_lib.run_config(one.run)
      tokens = config.data.batch_size * config.data.sequence_length
      steps, losses = zip(*one.curve)
      found.append(
        figures.Curve(
          size=_label(one.run.overrides),
          scheme=one.residual,
          seed=config.seed,
          steps=steps,
          tokens=tuple(step * tokens for step in steps),
          loss=losses,
        )
      )
  return svg.to_svg(figures.training(found), "curves") if found else ""


def _facts(folder: epath.Path, rows: Sequence[Row]) -> dict[str, Any]:
  """Of the runs, not of the machine that draws the page."""
  columns = {
    "Devices": "device",
    "Hardware": "hardware",
    "Python": "python",
    "jax": "jax",
    "Commit": "commit",
    "Data": "data",
  }
  of_runs = {
    label: ", ".join(sorted({str(row[name]) for row in rows}))
    for label, name in columns.items()
  }
  return {
    "Sweep": folder_lib.source(folder),
    **of_runs,
    "Date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
  }


def by_size(rows: Sequence[Row]) -> dict[str, list[Row]]:
  """Rows by size and, where it was cut, budget."""
  groups: dict[str, list[Row]] = {}
  for row in rows:
    groups.setdefault(_label(row), []).append(row)
  return groups


def _label(row: Row) -> str:
  """Size and, where it was cut, budget."""
  budget = row.get("budget", "")
  return str(row.get("size", "")) + (f", budget {budget}" if budget else "")


def losses_of(rows: Sequence[Row], scheme: str) -> list[float]:
  """Validation losses of one scheme, in nats per token."""
  return [
    float(row["validation_loss"]) for row in rows if row["residual"] == scheme
  ]


def differences(rows: Sequence[Row], scheme: str) -> list[float]:
  """To the baseline, seed by seed."""
  baseline = {
    row["seed"]: float(row["validation_loss"])
    for row in rows
    if row["residual"] == figures.BASELINE
  }
  return [
    float(row["validation_loss"]) - baseline[row["seed"]]
    for row in rows
    if row["residual"] == scheme and row["seed"] in baseline
  ]


def _cell(rows: Sequence[Row], scheme: str) -> str:
  own = losses_of(rows, scheme)
  if not own:
    return ""
  text = f"{statistics.fmean(own):.4f}"
  apart = differences(rows, scheme)
  if apart and scheme != figures.BASELINE:
    text += f"<small><b>{page.signed(statistics.fmean(apart))}</b></small>"
  seeds = "".join(f"<small>{loss:.4f}</small>" for loss in own)
  return text + seeds


def _interval(estimate: fit_lib.Estimate, digits: int) -> str:
  text = f"{estimate.value:.{digits}f}"
  if estimate.low is None:
    return text
  low, high = f"{estimate.low:.{digits}f}", f"{estimate.high:.{digits}f}"
  return f"{text}<small>{low} to {high}</small>"


def _share(seconds: float, total: float) -> str:
  share = f"{seconds / total:.0%}" if total else ""
  return f"{share}<small>{seconds:,.0f} s</small>"
