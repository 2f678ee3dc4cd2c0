# SPDX-License-Identifier: Apache-2.0
"""Command, tables and figures of a study (`experiments.variants`)."""

from collections.abc import Mapping, Sequence
import functools
import pathlib
import statistics
from typing import Any

from matplotlib import figure as figure_lib
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import scaling
from attnres_jax.analysis import figures
from attnres_jax.common import csv_rows
from attnres_jax.scaling import fit as fit_lib
from attnres_jax.scaling import pairs
from attnres_jax.scaling import paper
from attnres_jax.sweep import cli
from attnres_jax.sweep.pages import losses as losses_lib
from attnres_jax.sweep.pages import page
from attnres_jax.sweep.pages import sweep_page
from experiments.pages import readme
from experiments.pages import sweep
from experiments.variants import BASELINE
from experiments.variants import CONTROL
from experiments.variants import TWICE
from experiments.variants import Study

_RATE, _BUDGET = "optim.peak_lr", "budget"
_EXPERIMENTS = pathlib.Path(__file__).absolute().parents[1]
# Rows of the protocol of configs/paired.py.
_LAPTOP = (
  "ablations/results.csv",
  "block_size/results.csv",
  "depth_heads/results.csv",
  "residual_zoo/trained.csv",
)

Row = Mapping[str, Any]


def experiment(
  file: str,
  doc: str | None,
  study: Study,
  places: Sequence[readme.Place] = (),
  render: sweep_page.Render | None = None,
) -> tuple[cli.Experiment, readme.Published]:
  """The command of a study, and what it publishes.

  Args:
    file: run.py of the experiment.
    doc: its docstring.
    study: what it trains.
    places: what its README has besides the table of all variants.
    render: renders the report; by default it shows that table.
  """
  return sweep.experiment(
    file,
    doc,
    render=render
    or functools.partial(
      sweep_page.render, answer=functools.partial(answer, study)
    ),
    places=[readme.Place(functools.partial(results, study)), *places],
    figures={"differences.svg": functools.partial(forest, study)},
  )


def with_shared(study: Study, rows: Sequence[Row]) -> list[Row]:
  """The rows, and those committed for networks that another study trains.

  None of another text, number of steps, rate or size of network.
  """
  if study.shares is None:
    return list(rows)
  other = _read(f"{study.shares.name}/results.csv")
  if not _protocols(rows) & _protocols(other):
    return list(rows)
  names_here = {row["run"] for row in rows}
  names = set(study.shared)
  return [
    *rows,
    *(
      row
      for row in other
      if row["variant"] in names and row["run"] not in names_here
    ),
  ]


def results(study: Study, rows: Sequence[Row]) -> str:
  """For the README."""
  every = with_shared(study, rows)
  return readme.text(
    rates(every) if study.rates and BASELINE not in study.shared else None,
    table(study, every),
    twice(study, every),
    protocol(study, rows),
    readme.origin(every, runs=True),
  )


def answer(study: Study, rows: Sequence[Row]) -> page.Html:
  """For the report: a line per variant that is finished."""
  return page.fill(
    "<h2>Losses</h2>\n{{ table }}\n<p class=note>Validation loss in nats per"
    " token after the last step, the mean over seeds. Differences are taken"
    " seed by seed, with their 90 % interval. The effective speed-up is how"
    " many times the FLOPs PreNorm needs for the same loss.</p>",
    table=table(study, with_shared(study, rows)).html()
    if rows
    else "No run is done yet.",
  )


def protocol(study: Study, rows: Sequence[Row]) -> str | None:
  """The sentence of a README about its intervals; None without any."""
  spread = spread_of(rows, study)
  return (
    None
    if spread is None
    else (
      f"\N{PLUS-MINUS SIGN} is a {pairs.LEVEL:.0%} t interval of the mean; the"
      f" standard deviation of a pair, {spread.deviation:.4f} nats with"
      f" {spread.freedom:.1f} degrees of freedom, is the protocol's."
    )
  )


def spread_of(rows: Sequence[Row], study: Study) -> pairs.Spread | None:
  """The spread of the protocol to which rows belong.

  All committed rows of the laptop's protocol count if the rows are of it, so
  that the same pairs have the same interval on every page.
  """
  used = at_own_settings(with_shared(study, rows))
  protocols = _protocols(used)
  committed = (
    row
    for path in _LAPTOP
    for row in at_own_settings(_read(path))
    if _protocols([row]) <= protocols
  )
  # A run that was trained again, perhaps under another name, counts once.
  runs = {(r["variant"], int(r["seed"])): r for r in (*committed, *used)}
  losses = pairs.losses([*runs.values()], "variant")
  return pairs.pooled(losses, BASELINE, CONTROL)


def _read(path: str) -> list[dict[str, str]]:
  return csv_rows.read(_EXPERIMENTS / path, missing_ok=True)


def _protocols(rows: Sequence[Row]) -> set[tuple[str, ...]]:
  """What rows have in common whose losses can be compared."""
  # Of a sweep, these are numbers; in a file, text. By 6ND, all schemes of a
  # network need the same.
  names = "data", "tokens", "peak_lr", "compute_6nd"
  return {
    tuple(str(row.get(name)) for name in names) for row in at_own_settings(rows)
  }


def table(study: Study, rows: Sequence[Row]) -> page.Table:
  """A line per variant that has a pair, and the baseline."""
  losses = pairs.losses(at_own_settings(rows), "variant")
  apart = differences(study, rows)
  published = any(
    variant.published is not None
    for name, variant in study.variants.items()
    if name != BASELINE
  )
  lines = []
  for name, variant in study.variants.items():
    if name not in losses or (name != BASELINE and name not in apart):
      continue
    gap, number = apart.get(name), len(losses[name])
    lines.append([
      variant.label, *([_published(study, name)] if published else []),
      f"{statistics.fmean(losses[name].values()):.4f}",
      page.difference(gap) if gap else "",
      len(gap.by_seed) if gap else number,
      _speedup(rows, name, gap.spread) if gap else "",
    ])  # fmt: skip
  header = [
    "residual", *(["in the paper"] if published else []), "loss",
    "minus PreNorm", "pairs", "effective speed-up",
  ]  # fmt: skip
  if not any(line[-1] for line in lines):  # Too few computes for a law.
    header, *lines = ([*line[:-1]] for line in (header, *lines))
  return page.Table(header, lines)


def rates(rows: Sequence[Row]) -> page.Table:
  """Losses of PreNorm at each rate that was tried with several seeds."""
  tried = [
    row for row in rows if row["variant"] == BASELINE and not row.get(_BUDGET)
  ]
  if len({float(row["peak_lr"]) for row in tried}) < 2:
    return page.Table((), ())
  runs = losses_lib.frame(tried).astype({"peak_lr": float, "seed": int})
  arms = runs.pivot_table("loss", "peak_lr", "seed").dropna(axis="columns")
  lines = [
    [f"{rate:g}", *map("{:.4f}".format, arms.loc[rate])] for rate in arms.index
  ]
  return page.Table(["rate under PreNorm", *(f"seed {s}" for s in arms)], lines)


def twice(study: Study, rows: Sequence[Row]) -> page.Table:
  """Differences with once and with twice the steps, in the same seeds."""
  once, both = (
    pairs.losses(at_own_settings(rows, budget), "variant")
    for budget in (1.0, TWICE)
  )
  lines = []
  for name in study.longer:
    four = [
      arms.get(arm, {}) for arms in (once, both) for arm in (name, BASELINE)
    ]
    if seeds := set.intersection(*map(set, four)):
      ours, base, ours_twice, base_twice = (
        statistics.fmean(arm[seed] for seed in seeds) for arm in four
      )
      gaps = map(page.signed, (ours - base, ours_twice - base_twice))
      lines.append([study.variants[name].label, *gaps, len(seeds)])
  header = ("residual", "difference", "with twice the steps", "pairs")
  return page.Table(header, lines)


def forest(
  study: Study, rows: Sequence[Row], in_order: bool = False
) -> figure_lib.Figure:
  """Differences with intervals; hollow marks are the paper's.

  Intervals far longer than others leave the picture.

  Args:
    study: of the rows.
    rows: its own.
    in_order: the smallest loss first, not the order of the study.
  """
  apart = differences(study, rows)
  names = [name for name in study.variants if name in apart]
  if in_order:
    names.sort(key=lambda name: apart[name].mean)
  shape = figure_lib.Figure(
    figsize=(7.4, 1.2 + 0.32 * len(names)), layout="constrained"
  )
  axes = shape.subplots()
  seen = [0.0]
  for height, name in enumerate(names):
    variant, gap = study.variants[name], apart[name]
    if gap.mean > pairs.FAILED:  # Would leave no room for the others.
      axes.annotate(
        f"failed: {page.signed(gap.mean, 2)} \N{RIGHTWARDS ARROW}",
        (1.0, height), xycoords=("axes fraction", "data"), ha="right",
        va="center", fontsize=8, color="grey",
      )  # fmt: skip
      continue
    look = figures.look_of(variant.residual)
    values = list(gap.by_seed.values())
    length = min(gap.margin or 0.0, pairs.FAILED / 2)
    seen += [*values, gap.mean - length, gap.mean + length]
    axes.plot(
      values, np.full(len(values), height), ".", color=look.colour, alpha=0.5,
      label="a pair of runs",
    )  # fmt: skip
    axes.errorbar(
      gap.mean, height, xerr=gap.margin, fmt=look.marker, color=look.colour,
      capsize=4, label="mean and 90 % interval",
    )  # fmt: skip
    if variant.published is not None:
      axes.plot(
        variant.published - paper.TABLE_4[BASELINE], height, "D",
        markerfacecolor="none", color="grey", label="paper, 436M parameters",
      )  # fmt: skip
  axes.axvline(0.0, color="grey", linewidth=0.8)
  space = 0.03 * (max(seen) - min(seen)) + 0.005
  axes.set_xlim(min(seen) - space, max(seen) + space)
  labels = [study.variants[name].label for name in names]
  axes.set_yticks(range(len(names)), labels)
  axes.set_ylim(max(1, len(names)) - 0.5, -0.5)
  axes.set_xlabel("minus PreNorm, nats per token")
  figures.style(axes)
  figures.legend(shape, axes)
  return shape


def differences(
  study: Study, rows: Sequence[Row]
) -> dict[str, pairs.Difference]:
  """Differences from the baseline of every variant that has a pair."""
  every = at_own_settings(with_shared(study, rows))
  losses, spread = pairs.losses(every, "variant"), spread_of(rows, study)
  return pairs.differences(losses, BASELINE, CONTROL, spread)


def at_own_settings(rows: Sequence[Row], budget: float = 1.0) -> list[Row]:
  """Rows at the chosen rate, with this multiple of the steps."""
  return [
    row
    for row in rows
    if not row.get(_RATE) and float(row.get(_BUDGET) or 1.0) == budget
  ]


def _speedup(
  rows: Sequence[Row], name: str, spread: pairs.Spread | None
) -> str:
  """By the law of PreNorm over its budgets; empty without these or pairs.

  Empty for arms that failed, too: they have no spread.
  """
  if spread is None:
    return ""
  baseline = [
    row for row in rows if row["variant"] == BASELINE and not row.get(_RATE)
  ]
  other = [row for row in at_own_settings(rows) if row["variant"] == name]
  try:
    estimate = scaling.effective_speedup(
      _runs(baseline), _runs(other), spread=spread
    )
  except config_lib.ConfigError:
    return ""
  return str(page.interval(*estimate))


def _runs(rows: Sequence[Row]) -> fit_lib.Runs:
  return fit_lib.Runs(
    compute=[float(row["compute_residual"]) for row in rows],
    loss=[fit_lib.loss_of(row) for row in rows],
    size=tuple(int(row["tokens"]) for row in rows),
    seed=tuple(int(row["seed"]) for row in rows),
  )


def _published(study: Study, name: str) -> str:
  """The paper's loss and its difference from the baseline."""
  loss = study.variants[name].published
  if loss is None or name == BASELINE:
    return f"{loss:.3f}" if loss else ""
  return f"{loss:.3f} ({page.signed(loss - paper.TABLE_4[BASELINE], 3)})"
