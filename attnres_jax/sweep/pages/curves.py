# SPDX-License-Identifier: Apache-2.0
"""Losses during runs, and differences from the baseline."""

from collections.abc import Sequence
from typing import Any

from matplotlib import figure as figure_lib
from matplotlib import ticker
import numpy as np
import pandas as pd

from attnres_jax.analysis import figures
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import monitor
from attnres_jax.sweep.pages import losses

# More panels would not be readable.
_MAX_PANELS = 8
_TITLE_LETTERS = 80

# A point of a run: its tokens, its loss, and where it is drawn.
COLUMNS = ("setting", "scheme", "seed", "tokens", "loss")


def of_sweep(progress: Sequence[monitor.Progress]) -> losses.Frame:
  """Losses of runs, a row per logged step, of `COLUMNS`.

  A variant is no setting if it alone has its scheme.
  """
  readable = [(run, run.run) for run in progress if run.run is not None]
  variants = {(p.residual, r.overrides.get("variant", "")) for p, r in readable}
  schemes = [scheme for scheme, _ in variants]
  without = {"variant"} if len(schemes) == len(set(schemes)) else set()
  points: list[tuple[Any, ...]] = []
  for described, run in readable:
    config = folder_lib.run_config(run)
    tokens = config.data.batch_size * config.data.sequence_length
    setting = losses.setting(run.overrides, without)
    points += [
      (setting, described.residual, config.seed, step * tokens, loss)
      for step, loss in described.curve
    ]
  return pd.DataFrame(points, columns=COLUMNS)


def draw(points: losses.Frame) -> figure_lib.Figure | None:
  """Losses, and below them differences from the baseline, seed by seed.

  None if there is nothing to draw, or too many panels.
  """
  panels = dict(tuple(points.groupby("setting", sort=False)))
  if not 0 < len(panels) <= _MAX_PANELS:
    return None
  figure = figure_lib.Figure(figsize=(8.4, 4.6), layout="constrained")
  grid = figure.subplots(2, len(panels), squeeze=False, sharex="col")
  handles = {}
  for (upper, lower), (setting, panel) in zip(grid.T, panels.items()):
    # Tokens down, seeds across.
    panel = panel.drop_duplicates(["scheme", "seed", "tokens"], keep="last")
    arms = {
      scheme: arm.pivot(index="tokens", columns="seed", values="loss")
      for scheme, arm in panel.groupby("scheme", sort=False)
    }
    baseline = arms.get(losses.BASELINE)
    for scheme, arm in arms.items():
      handles[figures.name_of(scheme)] = _lines(upper, arm, scheme)
      if scheme != losses.BASELINE and baseline is not None:
        _lines(lower, differences(arm, baseline), scheme)
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


def differences(arm: losses.Frame, baseline: losses.Frame) -> losses.Frame:
  """An arm minus the baseline, in the seeds and at the tokens of both."""
  apart = arm - baseline
  return apart.loc[
    apart.index.isin(arm.index) & apart.index.isin(baseline.index),
    arm.columns.intersection(baseline.columns),
  ]


def _lines(axes: Any, arm: losses.Frame, scheme: str) -> Any:
  """Draws the mean over seeds, up to the shortest run, and each seed thinly.

  All are means of finite losses over the last tenth, fewer at the start. None
  if there is nothing to draw.
  """
  if arm.empty:
    return None
  style = figures.style_of(scheme) | {"linewidth": 1.4}
  width = max(1, round(len(arm) / 10))
  means = arm.replace([np.inf, -np.inf], np.nan).rolling(width, 1).mean()
  means = means.where(arm.bfill().notna())  # None after the end of a run.
  means.index /= 1e6
  if len(arm.columns) > 1:
    thin = {"color": style["color"], "linewidth": 0.6, "alpha": 0.45}
    axes.plot(means, **thin)
  (line,) = axes.plot(means.mean(axis=1, skipna=False), **style)
  return line
