# SPDX-License-Identifier: Apache-2.0
"""The figures of the report, as SVG that follows the page's colours."""

from collections.abc import Mapping, Sequence
import io
import re

import matplotlib
from matplotlib import figure as figure_lib
from matplotlib import ticker
import numpy as np

from attnres_jax.analysis import plots
from experiments.demo import results

# Stands for "the colour of text" until the page knows what that is.
_INK = "#010203"

_RC = {
  "axes.edgecolor": _INK,
  "axes.labelcolor": _INK,
  "axes.labelsize": 10,
  "axes.titlecolor": _INK,
  "axes.titlelocation": "left",
  "axes.titlesize": 10.5,
  "axes.titleweight": "bold",
  "font.family": "sans-serif",
  "font.size": 10,
  "grid.color": _INK,
  "legend.labelcolor": _INK,
  "svg.fonttype": "none",
  "text.color": _INK,
  "xtick.color": _INK,
  "ytick.color": _INK,
}


def style():
  """Context in which figures must be made for `to_svg` to theme them."""
  return matplotlib.rc_context(_RC)


def loss_curves(
  runs: Mapping[str, Sequence[results.Run]],
) -> figure_lib.Figure:
  """Losses over tokens, and what separates them from the baseline's.

  Means over seeds; the thin lines are seeds.
  """
  figure = figure_lib.Figure(figsize=(8.4, 3.1), layout="constrained")
  train, validation, less = figure.subplots(1, 3)
  baseline = {
    run.seed: np.asarray(run.validation_loss)
    for run in runs.get(results.BASELINE, ())
  }
  for scheme, several in runs.items():
    drawn = plots.style_of(scheme) | {"label": plots.name_of(scheme)}
    tokens = np.asarray(several[0].train_tokens) / 1e3
    smooth = [_smooth(run.train_loss) for run in several]
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
      _mean_and_each(less, tokens, differences, drawn)
  train.set_title("Training (running mean)")
  train.set_ylabel("nats per byte")
  validation.set_title("Validation")
  less.set_title("Validation, less PreNorm")
  for axes in (train, validation, less):
    axes.set_xlabel("thousand tokens")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
    plots.style(axes)
  plots.legend(figure, train)
  return figure


def _mean_and_each(axes, x, series, drawn) -> None:
  axes.plot(x, np.mean(series, 0), **drawn)
  for y in series if len(series) > 1 else ():
    axes.plot(x, y, color=drawn["color"], linewidth=0.7, alpha=0.5)


def to_svg(figure: figure_lib.Figure, salt: str) -> str:
  """An <svg> element for inclusion in a page.

  Args:
    figure: made within `style()`.
    salt: keeps the ids of several figures on one page apart.
  """
  with matplotlib.rc_context(_RC | {"svg.hashsalt": salt}):
    buffer = io.StringIO()
    figure.savefig(
      buffer, format="svg", transparent=True, metadata={"Date": None}
    )
  svg = buffer.getvalue()
  svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
  svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
  # Names of groups repeat from figure to figure and nothing refers to them.
  used = set(re.findall(r"""(?:url\(|href=")#([^)"]+)""", svg))
  svg = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", svg)
  # Sized by the page: the viewBox keeps the proportions.
  svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
  return re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)


def _smooth(values: Sequence[float], share: float = 0.05) -> np.ndarray:
  """Mean over the last 5 % of the run (fewer at its start)."""
  width = max(1, round(share * len(values)))
  total = np.concatenate([[0.0], np.cumsum(values)])
  stop = np.arange(1, len(values) + 1)
  start = np.maximum(0, stop - width)
  return (total[stop] - total[start]) / (stop - start)
