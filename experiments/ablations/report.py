# SPDX-License-Identifier: Apache-2.0
"""Differences of the rows of Table 4 from PreNorm, ours and the paper's."""

from collections.abc import Mapping, Sequence
import statistics
from typing import Any

from matplotlib import figure as figure_lib
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import figures
from attnres_jax import scaling
from attnres_jax.scaling import fit as fit_lib
from experiments.ablations import config as ablations
from experiments.pages import page
from experiments.pages import pairs
from experiments.pages import sweep

BASELINE, CONTROL = ablations.BASELINE, ablations.CONTROL
_RATE, _BUDGET = "optim.peak_lr", "budget"
COUNTING = "residual"

Row = Mapping[str, Any]


def results(rows: Sequence[Row]) -> str:
  """For the README."""
  tables = [rates(rows), table(rows)]
  parts = [one.markdown() for one in tables if one.rows]
  return "\n\n".join([*parts, sweep.origin(rows)])


def table(rows: Sequence[Row]) -> page.Table:
  """A line per variant that has a pair, and the baseline."""
  found = pairs.losses(_main(rows), "variant")
  apart = pairs.differences(found, BASELINE, CONTROL)
  lines = []
  for name, variant in ablations.VARIANTS.items():
    if name not in found:
      continue
    loss = f"{statistics.fmean(found[name].values()):.4f}"
    published, seeds = variant.published, str(len(found[name]))
    if name == BASELINE:
      lines.append([variant.label, f"{published:.3f}", loss, "", "", seeds, ""])
    elif name in apart:
      lines.append(
        [
          variant.label,
          _published(name),
          loss,
          page.signed(apart[name].mean),
          _interval(apart[name]),
          str(len(apart[name].by_seed)),
          _speedup(rows, name),
        ]
      )
  header = (
    "residual", "in the paper", "loss", "difference", "90 % interval", "pairs",
    "effective speed-up",
  )  # fmt: skip
  return page.Table(header, lines)


def rates(rows: Sequence[Row]) -> page.Table:
  """Losses of PreNorm at each rate that was tried with several seeds."""
  tried: dict[float, dict[int, float]] = {}
  for row in rows:
    if row["variant"] == BASELINE and not row.get(_BUDGET):
      own = tried.setdefault(float(row["peak_lr"]), {})
      own[int(row["seed"])] = float(row["validation_loss"])
  if len(tried) < 2:
    return page.Table((), ())
  common = sorted(set.intersection(*(set(own) for own in tried.values())))
  lines = [
    [f"{rate:g}", *(f"{own[seed]:.4f}" for seed in common)]
    for rate, own in sorted(tried.items())
  ]
  header = ["rate under PreNorm", *(f"seed {seed}" for seed in common)]
  return page.Table(header, lines)


def figure(rows: Sequence[Row]) -> figure_lib.Figure:
  """Differences with intervals; hollow marks are the paper's."""
  apart = pairs.differences(
    pairs.losses(_main(rows), "variant"), BASELINE, CONTROL
  )
  names = [name for name in ablations.VARIANTS if name in apart]
  shape = figure_lib.Figure(
    figsize=(7.4, 1.2 + 0.32 * len(names)), layout="constrained"
  )
  axes = shape.subplots()
  for height, name in enumerate(names):
    variant, own = ablations.VARIANTS[name], apart[name]
    look = figures.look_of(variant.residual)
    values = list(own.by_seed.values())
    axes.plot(
      values, np.full(len(values), height), ".", color=look.colour, alpha=0.5,
      label="a pair of runs" if height == 0 else None,
    )  # fmt: skip
    axes.errorbar(
      own.mean, height, xerr=own.margin, fmt=look.marker, color=look.colour,
      capsize=4, label="mean and 90 % interval" if height == 0 else None,
    )  # fmt: skip
    if variant.published is not None:
      axes.plot(
        _paper(name), height, "D", markerfacecolor="none", color="grey",
        label="paper, 436M parameters" if height == 0 else None,
      )  # fmt: skip
  axes.axvline(0.0, color="grey", linewidth=0.8)
  labels = [ablations.VARIANTS[name].label for name in names]
  axes.set_yticks(range(len(names)), labels)
  axes.set_ylim(max(1, len(names)) - 0.5, -0.5)
  axes.set_xlabel("difference from PreNorm, nats per token")
  figures.style(axes)
  figures.legend(shape, axes)
  return shape


def _main(rows: Sequence[Row]) -> list[Row]:
  """Rows at the chosen rate and budget."""
  return [row for row in rows if not row.get(_RATE) and not row.get(_BUDGET)]


def _speedup(rows: Sequence[Row], name: str) -> str:
  """By the law of PreNorm over its budgets; empty without these or pairs."""
  baseline = [
    row for row in rows if row["variant"] == BASELINE and not row.get(_RATE)
  ]
  other = [row for row in _main(rows) if row["variant"] == name]
  try:
    found = scaling.effective_speedup(*map(_runs, (baseline, other)))
  except config_lib.ConfigError:
    return ""
  return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _runs(rows: Sequence[Row]) -> fit_lib.Runs:
  return fit_lib.Runs(
    compute=[float(row[f"compute_{COUNTING}"]) for row in rows],
    loss=[float(row["validation_loss"]) for row in rows],
    size=tuple(row["tokens"] for row in rows),
    seed=tuple(int(row["seed"]) for row in rows),
  )


def _paper(name: str) -> float:
  published = ablations.VARIANTS[name].published
  base = ablations.VARIANTS[BASELINE].published
  assert published is not None and base is not None
  return published - base


def _published(name: str) -> str:
  """The paper's loss and its difference from the baseline."""
  loss = ablations.VARIANTS[name].published
  if loss is None:
    return ""
  return f"{loss:.3f} ({page.signed(_paper(name), 3)})"


def _interval(difference: pairs.Difference) -> str:
  if difference.margin is None:
    return ""
  ends = (difference.mean + sign * difference.margin for sign in (-1, 1))
  return "[" + ", ".join(page.signed(end) for end in ends) + "]"
