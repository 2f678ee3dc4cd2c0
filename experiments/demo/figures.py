# SPDX-License-Identifier: Apache-2.0
"""The figures of the report, made within `pages.svg.style()`."""

from collections.abc import Mapping, Sequence

from matplotlib import figure as figure_lib
from matplotlib import ticker
import numpy as np

from attnres_jax.analysis import plots
from experiments.demo import results
from experiments.pages import curves


def loss_curves(
  runs: Mapping[str, Sequence[results.Run]],
) -> figure_lib.Figure:
  """Losses over tokens, and what separates them from the baseline's.

  Means over seeds; the thin lines are seeds.
  """
  figure = figure_lib.Figure(figsize=(8.4, 3.1), layout="constrained")
  train, validation, apart = figure.subplots(1, 3)
  baseline = {
    run.seed: np.asarray(run.validation_loss)
    for run in runs.get(results.BASELINE, ())
  }
  for scheme, several in runs.items():
    drawn = plots.style_of(scheme) | {"label": plots.name_of(scheme)}
    tokens = np.asarray(several[0].train_tokens) / 1e3
    smooth = [curves.smooth(run.train_loss) for run in several]
    train.plot(tokens, np.mean(smooth, 0), **drawn)
    drawn |= {"marker": "o", "markersize": 3}
    tokens = np.asarray(several[0].validation_tokens) / 1e3
    losses = [np.asarray(run.validation_loss) for run in several]
    _mean_and_each(validation, tokens, losses, drawn)
    differences = [
      loss - baseline[run.seed]
      for run, loss in zip(several, losses, strict=True)
      if run.seed in baseline
    ]
    if differences:
      _mean_and_each(apart, tokens, differences, drawn)
  train.set_title("Training (running mean)")
  train.set_ylabel("nats per byte")
  validation.set_title("Validation")
  apart.set_title("Difference from PreNorm")
  for axes in (train, validation, apart):
    axes.set_xlabel("thousand tokens")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
    plots.style(axes)
  plots.legend(figure, train)
  return figure


def _mean_and_each(axes, x, series, drawn) -> None:
  axes.plot(x, np.mean(series, 0), **drawn)
  for y in series if len(series) > 1 else ():
    axes.plot(x, y, color=drawn["color"], linewidth=0.7, alpha=0.5)
