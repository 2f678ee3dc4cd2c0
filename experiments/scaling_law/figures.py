# SPDX-License-Identifier: Apache-2.0
"""The figures of the report, made within `pages.svg.style()`."""

from collections.abc import Mapping, Sequence
import dataclasses

from matplotlib import figure as figure_lib
from matplotlib import ticker
import numpy as np

from attnres_jax.analysis import plots as style_lib
from attnres_jax.scaling import fit as fit_lib
from attnres_jax.scaling import plots
from experiments.pages import curves

BASELINE = "prenorm"


@dataclasses.dataclass(frozen=True)
class Curve:
  """Training losses of one run, finished or not.

  Attributes:
    size: label of its panel.
    scheme: a key of `RESIDUALS`.
    seed: runs of one size and seed see the same batches.
    steps: of the entries of `loss`.
    tokens: seen at each of them.
    loss: nats per token.
  """

  size: str
  scheme: str
  seed: int
  steps: tuple[int, ...]
  tokens: tuple[int, ...]
  loss: tuple[float, ...]


def laws(
  runs: Mapping[str, fit_lib.Runs],
  fits: Mapping[str, fit_lib.Fit],
  counting: str,
) -> figure_lib.Figure:
  """Loss over compute, ours beside the paper's; slopes compare, heights do not.

  Args:
    runs: of each scheme.
    fits: of each scheme that has enough sizes.
    counting: of the compute, on both sides.
  """
  figure = figure_lib.Figure(figsize=(8.4, 3.9), layout="constrained")
  ours, theirs = figure.subplots(1, 2)
  advantage = None
  if {BASELINE, "block_attnres"} <= fits.keys():
    largest = max(float(own.compute.max()) for own in runs.values())
    advantage = (BASELINE, "block_attnres", largest)
  plots.draw_scaling(
    runs, fits, counting, ax=ours, title="this sweep", advantage=advantage
  )
  plots.draw_paper(counting, ax=theirs)
  return figure


def training(found: Sequence[Curve]) -> figure_lib.Figure:
  """Training losses by size, and what separates them from the baseline's.

  A line is the mean over the seeds that came as far.
  """
  sizes = list(dict.fromkeys(curve.size for curve in found))
  figure = figure_lib.Figure(figsize=(8.4, 4.6), layout="constrained")
  grid = figure.subplots(2, len(sizes), squeeze=False, sharex="col")
  handles = {}
  for (loss, less), size in zip(grid.T, sizes):
    here = [curve for curve in found if curve.size == size]
    baseline = {c.seed: c for c in here if c.scheme == BASELINE}
    for scheme in dict.fromkeys(curve.scheme for curve in here):
      own = [curve for curve in here if curve.scheme == scheme]
      style = style_lib.style_of(scheme) | {"linewidth": 1.4}
      label = style_lib.name_of(scheme)
      x, y = _mean([(c.tokens, c.loss) for c in own])
      (handles[label],) = loss.plot(x / 1e6, y, **style)
      differences = [
        _difference(c, baseline[c.seed]) for c in own if c.seed in baseline
      ]
      if scheme != BASELINE and differences:
        x, y = _mean(differences)
        less.plot(x / 1e6, y, **style)
    less.axhline(
      0.0, linewidth=0.8, color=style_lib.style_of(BASELINE)["color"]
    )
    loss.set_title(size)
    less.set_xlabel("million tokens")
    for axes in (loss, less):
      axes.xaxis.set_major_locator(ticker.MaxNLocator(3))
      style_lib.style(axes)
  grid[0][0].set_ylabel("training loss")
  grid[1][0].set_ylabel("difference from PreNorm")
  figure.legend(
    handles.values(), handles.keys(), loc="outside upper left",
    ncols=max(1, len(handles)), frameon=False,
  )  # fmt: skip
  return figure


def _difference(
  curve: Curve, baseline: Curve
) -> tuple[Sequence[int], Sequence[float]]:
  """Tokens and differences where both have a row."""
  known = dict(zip(baseline.steps, baseline.loss))
  rows = [
    (tokens, loss - known[step])
    for step, tokens, loss in zip(curve.steps, curve.tokens, curve.loss)
    if step in known
  ]
  return [tokens for tokens, _ in rows], [loss for _, loss in rows]


def _mean(
  series: Sequence[tuple[Sequence[int], Sequence[float]]],
) -> tuple[np.ndarray, np.ndarray]:
  """Smoothed, as far as the shortest of them goes."""
  length = min(len(x) for x, _ in series)
  x = np.asarray(series[0][0][:length], float)
  values = [curves.smooth(y[:length], share=0.1) for _, y in series]
  return x, np.mean(values, axis=0)
