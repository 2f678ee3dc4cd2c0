# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of Fig. 5, from the rows."""

from collections.abc import Mapping, Sequence
import json
from typing import Any

from matplotlib import figure as figure_lib
import numpy as np

from attnres_jax.analysis import figures
from experiments import trained
from experiments.ablations import config as ablations
from experiments.pages import page

BASELINE = "prenorm"
VARIANTS = (BASELINE, "block", "full")

Row = Mapping[str, str]
# Variant -> seed -> values.
Found = dict[str, dict[int, np.ndarray]]

_TITLES = {
  "state_rms": "running state after a block",
  "read_rms": "input of a sublayer",
  "output_rms": "output of a sublayer",
  "grad_norm": "gradient of a block's parameters",
  "output_grad_rms": "gradient by a sublayer's output",
}


def of_series(rows: Sequence[Row], series: str) -> Found:
  """The values of one series."""
  found: Found = {}
  for row in rows:
    if row["series"] == series:
      own = found.setdefault(row["variant"], {})
      own[int(row["seed"])] = np.asarray(json.loads(row["values"]))
  return found


def results(rows: Sequence[Row]) -> str:
  """For the README: last over first block, and largest over smallest."""
  header = ["", *_TITLES.values()]
  lines = []
  for label, ratio in (
    ("last over first", lambda x: x[-1] / x[0]),
    ("largest over smallest", lambda x: x.max() / x.min()),
  ):
    for variant in VARIANTS:
      cells = [
        trained.spread(
          [ratio(x) for x in of_series(rows, series)[variant].values()]
        )
        for series in _TITLES
        if variant in of_series(rows, series)
      ]
      if cells:
        lines.append([f"{trained.label(variant)}, {label}", *cells])
  return (
    f"{page.Table(header, lines).markdown()}\n\nMeans over seeds"
    f" {trained.seeds(rows)}; {trained.origin(rows)}"
  )


def magnitudes(rows: Sequence[Row]) -> figure_lib.Figure:
  """Along depth: a line per network, the mean over seeds in front."""
  shape = figure_lib.Figure(figsize=(8.4, 5.6), layout="constrained")
  grid = list(shape.subplots(2, 3).flat)
  for axes, (series, title) in zip(grid, _TITLES.items()):
    for variant, by_seed in of_series(rows, series).items():
      style = figures.style_of(ablations.STUDY.variants[variant].residual)
      values = np.stack(list(by_seed.values()))
      x = np.arange(1, values.shape[1] + 1)
      axes.plot(x, values.T, **_thin(style))
      axes.plot(x, values.mean(0), label=trained.label(variant), **style)
    axes.set_title(title, fontsize=9)
    of_block = series in ("state_rms", "grad_norm")
    axes.set_xlabel("transformer block" if of_block else "sublayer")
    axes.set_yscale("log")
    figures.style(axes)
  grid[-1].set_axis_off()
  figures.legend(shape, grid[0])
  return shape


def losses(rows: Sequence[Row]) -> figure_lib.Figure:
  """Training losses minus PreNorm's on the same batches, smoothed."""
  shape = figure_lib.Figure(figsize=(7.4, 3.2), layout="constrained")
  axes = shape.subplots()
  found, steps = of_series(rows, "train_loss"), of_series(rows, "step")
  base = found.get(BASELINE, {})
  for variant, by_seed in found.items():
    style = figures.style_of(ablations.STUDY.variants[variant].residual)
    apart = [
      _smooth(by_seed[seed] - base[seed]) for seed in by_seed if seed in base
    ]
    if variant == BASELINE or not apart:
      continue
    x = _smooth(next(iter(steps[variant].values())))
    for one in apart:
      axes.plot(x, one, **_thin(style))
    axes.plot(x, np.mean(apart, axis=0), label=trained.label(variant), **style)
  axes.axhline(0.0, color="grey", linewidth=0.8)
  axes.set_xlabel("step")
  axes.set_ylabel("training loss less PreNorm's,\nnats per token")
  figures.style(axes)
  figures.legend(shape, axes)
  return shape


def _thin(style: dict[str, Any]) -> dict[str, Any]:
  """Of single networks."""
  return style | {"linewidth": 0.6, "alpha": 0.5}


def _smooth(values: np.ndarray, window: int = 5) -> np.ndarray:
  """Means of neighbours; each logged loss covers one small batch."""
  return np.convolve(values, np.full(window, 1 / window), mode="valid")
