# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of a study (`experiments.variants`)."""

from collections.abc import Mapping, Sequence
import functools
import pathlib
import statistics
from typing import Any, NamedTuple

from matplotlib import figure as figure_lib
import numpy as np
import pandas as pd

from attnres_jax import config as config_lib
from attnres_jax import scaling
from attnres_jax.analysis import figures
from attnres_jax.common import csv_rows
from attnres_jax.scaling import pairs
from attnres_jax.scaling import paper
from attnres_jax.sweep import rows as rows_lib
from attnres_jax.sweep.pages import losses as losses_lib
from attnres_jax.sweep.pages import page
from attnres_jax.sweep.pages import sweep_page
from experiments.pages import readme
from experiments.variants import BASELINE
from experiments.variants import CONTROL
from experiments.variants import TWICE
from experiments.variants import Study
from experiments.variants import Variant

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


class Comparison(NamedTuple):
  """Variants of a study against PreNorm, at the chosen rate.

  Attributes:
    study: of the variants.
    rows: of the study, and committed ones of networks that it shares.
    losses: by variant and seed.
    spread: of the protocol; None without two pairs of a variant.
    apart: differences from PreNorm of every variant that has a pair.
  """

  study: Study
  rows: Sequence[Row]
  losses: pairs.Losses
  spread: pairs.Spread | None
  apart: Mapping[str, pairs.Difference]


def published(
  file: str, study: Study, parts: Sequence[readme.Part] = ()
) -> readme.Published:
  """What a study publishes: the table of all variants, and more `parts`."""
  bound = functools.partial
  return readme.Published(
    file,
    [
      readme.Part(bound(results, study)),
      readme.Part(bound(forest, study), document="differences.svg"),
      *parts,
    ],
    bound(sweep_page.render, answer=bound(answer, study)),
  )


def compare(study: Study, rows: Sequence[Row]) -> Comparison:
  """Compares rows, with those committed for networks of another study.

  None of another text, number of steps, rate or size of network.
  """
  rows = list(rows)
  other = _read(f"{study.shares.name}/results.csv") if study.shares else []
  if _protocols(rows) & _protocols(other):
    names, runs = set(study.shared), {row["run"] for row in rows}
    rows += [
      row for row in other if row["variant"] in names and row["run"] not in runs
    ]
  chosen = at_own_settings(rows)
  losses, spread = pairs.losses(chosen, "variant"), _spread(chosen)
  apart = pairs.differences(losses, BASELINE, CONTROL, spread)
  return Comparison(study, rows, losses, spread, apart)


def results(study: Study, rows: Sequence[Row]) -> str:
  """For the README."""
  compared = compare(study, rows)
  return readme.text(
    rates(rows) if study.rates and not study.shares else None,
    table(compared),
    twice(compared),
    protocol(compared),
    readme.origin(compared.rows, runs=True),
  )


def answer(study: Study, rows: Sequence[Row]) -> page.Html:
  """For the report: a line per variant that is finished."""
  return page.fill(
    "<h2>Losses</h2>\n{{ table }}\n<p class=note>Validation loss in nats per"
    " token after the last step, the mean over seeds. Differences are taken"
    " seed by seed, with their 90 % interval. The effective speed-up is how"
    " many times the FLOPs PreNorm needs for the same loss.</p>",
    table=table(compare(study, rows)).html() if rows else "No run is done yet.",
  )


def protocol(compared: Comparison) -> str | None:
  """The sentence of a README about its intervals; None without any."""
  if (spread := compared.spread) is None:
    return None
  return (
    f"\N{PLUS-MINUS SIGN} is a {pairs.LEVEL:.0%} t interval of the mean; the"
    f" standard deviation of a pair, {spread.deviation:.4f} nats with"
    f" {spread.freedom:.1f} degrees of freedom, is the protocol's."
  )


def table(compared: Comparison) -> page.Table:
  """A line per variant that has a pair, and the baseline."""
  variants = compared.study.variants
  losses, apart = compared.losses, compared.apart
  shown = apart.keys() | ({BASELINE} & losses.keys())
  return page.Table.of(
    [name for name in variants if name in shown],
    {
      "residual": lambda name: variants[name].label,
      "in the paper": functools.partial(_published, variants),
      "loss": lambda name: f"{statistics.fmean(losses[name].values()):.4f}",
      "minus PreNorm": lambda name: (
        page.difference(apart[name]) if name in apart else ""
      ),
      "pairs": lambda name: len(
        apart[name].by_seed if name in apart else losses[name]
      ),
      "effective speed-up": functools.partial(_speedup, compared),
    },
  )


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


def twice(compared: Comparison) -> page.Table:
  """Differences with once and with twice the steps, in the same seeds."""
  once, names = compared.losses, compared.study.longer
  longer = pairs.losses(at_own_settings(compared.rows, TWICE), "variant")
  lines = []
  for name in names:
    arms = [x.get(arm, {}) for x in (once, longer) for arm in (name, BASELINE)]
    seeds = pd.DataFrame(arms).T.dropna()
    if len(seeds):
      ours, base, ours_twice, base_twice = seeds.mean()
      gaps = map(page.signed, (ours - base, ours_twice - base_twice))
      lines.append([compared.study.variants[name].label, *gaps, len(seeds)])
  header = ("residual", "difference", "with twice the steps", "pairs")
  return page.Table(header, lines)


def forest(
  study: Study, rows: Sequence[Row], in_order: bool = False
) -> figure_lib.Figure:
  """Differences with intervals; hollow marks are the paper's.

  Intervals far longer than others leave the picture. In order, the smallest
  loss is first, otherwise variants have the study's order.
  """
  apart = compare(study, rows).apart
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


def at_own_settings(rows: Sequence[Row], budget: float = 1.0) -> list[Row]:
  """Rows at the chosen rate, with this multiple of the steps."""
  return [
    row
    for row in rows
    if not row.get(_RATE) and float(row.get(_BUDGET) or 1.0) == budget
  ]


def _spread(rows: Sequence[Row]) -> pairs.Spread | None:
  """The spread of the protocol to which rows belong.

  All committed rows of the laptop's protocol count if the rows are of it, so
  that the same pairs have the same interval on every page.
  """
  protocols = _protocols(rows)
  committed = (
    row
    for path in _LAPTOP
    for row in at_own_settings(_read(path))
    if _protocols([row]) <= protocols
  )
  # A run that was trained again, perhaps under another name, counts once.
  runs = {(r["variant"], int(r["seed"])): r for r in (*committed, *rows)}
  losses = pairs.losses([*runs.values()], "variant")
  return pairs.pooled(losses, BASELINE, CONTROL)


def _protocols(rows: Sequence[Row]) -> set[tuple[str, ...]]:
  """What rows have in common whose losses can be compared."""
  # Of a sweep, these are numbers; in a file, text. By 6ND, all schemes of a
  # network need the same.
  names = "data", "tokens", "peak_lr", "compute_6nd"
  return {
    tuple(str(row.get(name)) for name in names) for row in at_own_settings(rows)
  }


def _read(path: str) -> list[dict[str, str]]:
  return csv_rows.read(_EXPERIMENTS / path, missing_ok=True)


def _speedup(compared: Comparison, name: str) -> str:
  """By the law of PreNorm over its budgets; empty without these or pairs.

  Empty for arms that failed, too: they have no spread.
  """
  gap = compared.apart.get(name)
  if gap is None or gap.spread is None:
    return ""
  settings = {name: at_own_settings(compared.rows), BASELINE: compared.rows}
  used = [
    row
    for variant, rows in settings.items()
    for row in rows
    if row["variant"] == variant and not row.get(_RATE)
  ]
  tokens = lambda row: int(row["tokens"])
  try:
    runs = rows_lib.by_scheme(used, "residual", "variant", tokens)
    estimate = scaling.effective_speedup(
      runs[BASELINE], runs[name], spread=gap.spread
    )
  except config_lib.ConfigError:
    return ""
  return str(page.interval(*estimate))


def _published(variants: Mapping[str, Variant], name: str) -> str:
  """The paper's loss, if it has several, and its difference from PreNorm's."""
  losses = {n: v.published for n, v in variants.items() if v.published}
  if name not in losses or len(losses) == 1:
    return ""
  text = f"{losses[name]:.3f}"
  apart = page.signed(losses[name] - losses[BASELINE], 3)
  return text if name == BASELINE else f"{text} ({apart})"
