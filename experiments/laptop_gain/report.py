# SPDX-License-Identifier: Apache-2.0
"""The rate of each arm, and the four contrasts that were chosen beforehand."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from attnres_jax.scaling import pairs
from attnres_jax.sweep.pages import losses as losses_lib
from attnres_jax.sweep.pages import page
from experiments.laptop_gain import config
from experiments.pages import readme

Row = Mapping[str, Any]

# The family-wise error of the four tests.
ERROR = 0.05


class Contrast(NamedTuple):
  """One arm minus another, over paired seeds.

  Attributes:
    apart: final loss of the first minus the second, nats per token, with the
      95 % t interval of this contrast alone.
    p: of the paired t test, adjusted by Holm's method.
  """

  apart: pairs.Difference
  p: float


def contrasts(
  rows: Sequence[Row], column: str = "validation_loss"
) -> dict[tuple[str, str], Contrast]:
  """The contrasts of which both arms have two common seeds or more.

  A column has the losses.
  """
  losses = pairs.losses(rows, "arm", column)
  level = 1 - ERROR
  apart = {
    (arm, other): pairs.difference(
      losses.get(arm, {}), losses.get(other, {}), level=level
    )
    for arm, other in config.CONTRASTS
  }
  apart = {names: x for names, x in apart.items() if len(x.by_seed) > 1}
  seeds = [list(x.by_seed.values()) for x in apart.values()]
  adjusted = holm([stats.ttest_1samp(x, 0.0).pvalue for x in seeds])
  return dict(zip(apart, map(Contrast, apart.values(), adjusted)))


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
  table = losses_lib.lowest_marked(rows, "arm", "rate", _label)
  return readme.text(table, readme.origin(rows))


def results(rows: Sequence[Row]) -> str:
  """A table of the contrasts."""
  compared = contrasts(rows)
  if not compared:
    return "Not run yet."
  lines = []
  for names, (apart, p) in compared.items():
    outcome = "gains" if apart.mean < 0 else "harms"
    lines.append([
      _label(*names), len(apart.by_seed), page.difference(apart),
      f"{p:.4f}" if p >= 1e-4 else "< 0.0001",
      outcome if p < ERROR else "not rejected",
    ])  # fmt: skip
  header = ["contrast", "seeds", "nats per token", "p, by Holm", "outcome"]
  return readme.text(page.Table(header, lines), readme.origin(rows))


def course(rows: Sequence[Row]) -> str:
  """A table of the contrasts at each quarter of the steps."""
  # Rows of a sweep have the loss at the end only.
  places = [place for place in config.PLACES if f"loss_{place}" in rows[0]]
  columns = [*(f"loss_{place}" for place in places), "validation_loss"]
  compared = [contrasts(rows, column) for column in columns]
  lines = [
    [_label(*names), *(page.difference(at[names].apart) for at in compared)]
    for names in compared[-1]
  ]
  words = (place.replace("_", " ") for place in places)
  return readme.text(page.Table(["contrast", *words, "end"], lines))


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
  text = page.difference(contrast.apart, 3)
  if contrast.p >= ERROR:
    return f"shows no gain in the end ({text})"
  side = "below" if contrast.apart.mean < 0 else "above"
  return f"ends {text[1:]} nats per token {side} PreNorm"


def _label(*arms: str) -> str:
  return " minus ".join(config.ARMS[arm].label for arm in arms)


PUBLISHED = readme.Published(
  __file__,
  [
    readme.Part(rates, "rates", "rates"),
    readme.Part(results),
    readme.Part(course, "course"),
    readme.Part(gain, "gain", document="../../README.md"),
  ],
)
