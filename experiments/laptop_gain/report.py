# SPDX-License-Identifier: Apache-2.0
"""The rate of each arm, and the four contrasts that were chosen beforehand."""

from collections.abc import Mapping, Sequence
import statistics
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from attnres_jax.scaling import fit as fit_lib
from attnres_jax.scaling import pairs
from attnres_jax.sweep.pages import page
from experiments.laptop_gain import config
from experiments.pages import readme

Row = Mapping[str, Any]

# The family-wise error of the four tests.
ERROR = 0.05


class Contrast(NamedTuple):
  """One arm minus another, over paired seeds.

  Attributes:
    difference: mean final loss of the first minus the second, nats per token.
    margin: half the width of the 95 % t interval of this contrast alone.
    p: of the paired t test, adjusted by Holm's method.
    seeds: number of pairs.
  """

  difference: float
  margin: float
  p: float
  seeds: int


def mean_losses(rows: Sequence[Row]) -> dict[str, dict[float, float]]:
  """Mean validation losses in nats per token, by arm and by rate."""
  losses: dict[str, dict[float, list[float]]] = {}
  for row in rows:
    by_rate = losses.setdefault(row["arm"], {})
    by_rate.setdefault(float(row["rate"]), []).append(fit_lib.loss_of(row))
  return {
    arm: {rate: statistics.fmean(by_rate[rate]) for rate in sorted(by_rate)}
    for arm, by_rate in losses.items()
  }


def contrasts(
  rows: Sequence[Row], column: str = "validation_loss"
) -> dict[tuple[str, str], Contrast]:
  """The contrasts of which both arms have two common seeds or more.

  Args:
    rows: of runs.
    column: with the losses.
  """
  losses = pairs.losses(rows, "arm", column)
  by_arms, tests = {}, []
  for arm, other in config.CONTRASTS:
    seeds = sorted(losses.get(arm, {}).keys() & losses.get(other, {}).keys())
    if len(seeds) > 1:
      apart = [losses[arm][seed] - losses[other][seed] for seed in seeds]
      test = stats.ttest_1samp(apart, 0.0)
      low, high = test.confidence_interval(1 - ERROR)
      mean = statistics.fmean(apart)
      by_arms[arm, other] = Contrast(mean, (high - low) / 2, 1.0, len(seeds))
      tests.append(test.pvalue)
  adjusted = holm(tests)
  return {
    names: contrast._replace(p=p)
    for (names, contrast), p in zip(by_arms.items(), adjusted, strict=True)
  }


def holm(values: Sequence[float]) -> list[float]:
  """P-values adjusted for their number: reject those below the error."""
  order = np.argsort(values)
  factors = np.arange(len(values), 0, -1)
  steps = np.maximum.accumulate(np.asarray(values)[order] * factors)
  adjusted = np.empty(len(values))
  adjusted[order] = np.minimum(steps, 1.0)
  return adjusted.tolist()


def rates(rows: Sequence[Row]) -> str:
  """A table of mean losses; each arm's lowest is bold."""
  tried = sorted({float(row["rate"]) for row in rows})
  lines = []
  for arm, means in mean_losses(rows).items():
    best = min(means, key=lambda rate: means[rate])
    cells = {rate: f"{loss:.4f}" for rate, loss in means.items()}
    cells[best] = f"**{cells[best]}**"
    lines.append([config.LABELS[arm], *(cells.get(rate, "") for rate in tried)])
  header = ["arm", *(f"{rate:g}" for rate in tried)]
  return readme.with_origin(page.Table(header, lines).markdown(), rows)


def results(rows: Sequence[Row]) -> str:
  """A table of the contrasts."""
  compared = contrasts(rows)
  if not compared:
    return "Not run yet."
  lines = []
  for names, contrast in compared.items():
    outcome = "not rejected"
    if contrast.p < ERROR:
      outcome = "gains" if contrast.difference < 0 else "harms"
    lines.append(
      [
        _label(names),
        str(contrast.seeds),
        _interval(contrast),
        f"{contrast.p:.4f}" if contrast.p >= 1e-4 else "< 0.0001",
        outcome,
      ]
    )
  header = ["contrast", "seeds", "nats per token", "p, by Holm", "outcome"]
  return readme.with_origin(page.Table(header, lines).markdown(), rows)


def course(rows: Sequence[Row]) -> str:
  """A table of the contrasts at each quarter of the steps."""
  # Rows of a sweep have the loss at the end only.
  places = [place for place in config.PLACES if f"loss_{place}" in rows[0]]
  columns = [*(f"loss_{place}" for place in places), "validation_loss"]
  compared = [contrasts(rows, column) for column in columns]
  lines = [
    [_label(names), *(_interval(of_column[names]) for of_column in compared)]
    for names in compared[-1]
  ]
  words = (place.replace("_", " ") for place in places)
  return page.Table(["contrast", *words, "end"], lines).markdown()


def gain(rows: Sequence[Row]) -> str:
  """For the README of the repository: what depth attention buys."""
  compared = contrasts(rows)
  block, full = compared["block", "prenorm"], compared["full", "prenorm"]
  tokens = int(rows[0]["tokens"])
  sentences = [
    "**What it buys.** In the paper, PreNorm needs 1.25 times the compute of"
    " Block for the same loss.",
    f"Here, with a million parameters and {tokens / 1e6:.1f} MB of text, Block"
    f" {_outcome(block)}.",
    f"Full {_outcome(full)}; it leads at first"
    " ([how it was measured](experiments/laptop_gain/README.md)).",
  ]
  return " ".join(sentences)


def _outcome(contrast: Contrast) -> str:
  if contrast.p >= ERROR:
    return f"shows no gain in the end ({_interval(contrast, 3)})"
  size = f"{abs(contrast.difference):.3f} ± {contrast.margin:.3f}"
  side = "below" if contrast.difference < 0 else "above"
  return f"ends {size} nats per token {side} PreNorm"


def _interval(contrast: Contrast, digits: int = 4) -> str:
  difference = page.signed(contrast.difference, digits)
  return f"{difference} ± {contrast.margin:.{digits}f}"


def _label(names: tuple[str, str]) -> str:
  return " minus ".join(config.LABELS[name] for name in names)
