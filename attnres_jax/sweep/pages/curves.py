# SPDX-License-Identifier: Apache-2.0
"""Losses during runs, and differences from the baseline."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib import figure as figure_lib
from matplotlib import ticker
import numpy as np

from attnres_jax.analysis import figures
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import monitor
from attnres_jax.sweep.pages import losses

# More panels would not be readable.
_MAX_PANELS = 8
_TITLE_LETTERS = 80

# One run: tokens and losses.
Series = tuple[Sequence[float], Sequence[float]]
# The same, with steps.
Curve = Sequence[tuple[int, float]]
# Indexed by panel, scheme and seed.
Panels = Mapping[str, Mapping[str, Mapping[int, Series]]]


def of_sweep(
  progress: Sequence[monitor.Progress],
  curve: Callable[[monitor.Progress], Curve] = lambda run: run.curve,
) -> Panels:
  """Losses of runs, a panel per setting.

  A variant is no setting if it alone has its scheme.

  Args:
    progress: of a sweep.
    curve: steps and losses of a run; by default of training.
  """
  variants = {(run.residual, _variant(run)) for run in progress}
  schemes = [scheme for scheme, _ in variants]
  without = {"variant"} if len(schemes) == len(set(schemes)) else set()
  panels: dict[str, dict[str, dict[int, Series]]] = {}
  for run in progress:
    if run.run is not None and (points := curve(run)):
      config = folder_lib.run_config(run.run)
      tokens = config.data.batch_size * config.data.sequence_length
      steps, loss = np.transpose(points)
      setting = losses.setting(run.run.overrides, without)
      panel = panels.setdefault(setting, {})
      panel.setdefault(run.residual, {})[config.seed] = steps * tokens, loss
  return panels


def _variant(progress: monitor.Progress) -> str:
  return progress.run.overrides.get("variant", "") if progress.run else ""


def smooth(values: Sequence[float], share: float = 0.05) -> np.ndarray:
  """Mean of finite values over the last 5 % of the run, fewer at its start."""
  width = max(1, round(share * len(values)))
  finite = np.isfinite(values)
  sums = [np.cumsum(finite), np.cumsum(np.where(finite, values, 0.0))]
  stop = np.arange(1, len(values) + 1)
  start = np.maximum(0, stop - width)
  count, total = (
    padded[stop] - padded[start]
    for padded in (np.concatenate([[0.0], row]) for row in sums)
  )
  return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def draw(panels: Panels) -> figure_lib.Figure | None:
  """Losses, and below them differences from the baseline, seed by seed.

  None if there is nothing to draw, or too many panels.
  """
  if not 0 < len(panels) <= _MAX_PANELS:
    return None
  figure = figure_lib.Figure(figsize=(8.4, 4.6), layout="constrained")
  grid = figure.subplots(2, len(panels), squeeze=False, sharex="col")
  handles = {}
  for (upper, lower), (setting, schemes) in zip(grid.T, panels.items()):
    for scheme, runs in schemes.items():
      line = _lines(upper, list(runs.values()), scheme)
      handles[figures.name_of(scheme)] = line
      apart = differences(runs, schemes.get(losses.BASELINE, {}))
      if scheme != losses.BASELINE and apart:
        _lines(lower, apart, scheme)
    last = lower if lower.lines else upper
    if last is lower:
      grey = figures.style_of(losses.BASELINE)["color"]
      lower.axhline(0.0, linewidth=0.8, color=grey)
    else:  # The baseline alone.
      lower.set_visible(False)
      upper.tick_params(labelbottom=True)
    # As much as fits, with dollar signs escaped.
    title = setting[: _TITLE_LETTERS // len(panels)]
    upper.set_title(title.replace("$", r"\$"))
    last.set_xlabel("million tokens")
    for axes in (upper, lower):
      axes.xaxis.set_major_locator(ticker.MaxNLocator(3))
      figures.style(axes)
  grid[0][0].set_ylabel("loss")
  grid[1][0].set_ylabel("minus PreNorm's")
  figure.legend(
    handles.values(), handles.keys(), loc="outside upper left",
    ncols=min(len(handles), 4), frameon=False,
  )  # fmt: skip
  return figure


def differences(
  runs: Mapping[int, Series], baseline: Mapping[int, Series]
) -> list[Series]:
  """Differences for each seed that the baseline has, where both are known."""
  series: list[Series] = []
  for seed in runs.keys() & baseline.keys():
    base = dict(zip(*baseline[seed]))
    pairs = [(x, y - base[x]) for x, y in zip(*runs[seed]) if x in base]
    if pairs:
      series.append(([x for x, _ in pairs], [y for _, y in pairs]))
  return series


def _lines(axes: Any, series: Sequence[Series], scheme: str) -> Any:
  """Draws the mean over seeds, up to the shortest run, and each seed thinly.

  All are running means.
  """
  style = figures.style_of(scheme) | {"linewidth": 1.4}
  smoothed = [smooth(y, share=0.1) for _, y in series]
  for (x, _), y in zip(series, smoothed) if len(series) > 1 else ():
    thin = {"color": style["color"], "linewidth": 0.6, "alpha": 0.45}
    axes.plot(np.asarray(x, float) / 1e6, y, **thin)
  length = min(map(len, smoothed))
  x = np.asarray(series[0][0][:length], float)
  mean = np.mean([y[:length] for y in smoothed], axis=0)
  (line,) = axes.plot(x / 1e6, mean, **style)
  return line
