# SPDX-License-Identifier: Apache-2.0
"""Figures of the paper's analysis, for reports and notebooks.

Needs matplotlib (`pip install "attnres-jax[plots]"`). Every function returns a
new figure, independent of pyplot's state.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import axes as axes_lib
from matplotlib import colors
from matplotlib import figure as figure_lib
from matplotlib import ticker
import numpy as np

from attnres_jax.analysis import figures
from attnres_jax.analysis.depth_weights import DepthWeights
from attnres_jax.analysis.magnitudes import Magnitudes

_COLORMAP = "viridis"
# Panels of depth weights, and their names in titles.
KINDS = {"attention": "pre-attention", "mlp": "pre-MLP"}


def depth_weights(weights: Mapping[str, DepthWeights]) -> figure_lib.Figure:
  """Heatmaps in the layout of Fig. 8: a row per scheme, attention and MLP."""
  height = 2.9 * len(weights) + 0.2
  figure = figure_lib.Figure(figsize=(8.4, height), layout="constrained")
  grid = figure.subplots(len(weights), 2, squeeze=False)
  for row, (scheme, scheme_weights) in zip(grid, weights.items(), strict=True):
    mesh, *_ = [
      depth_panel(axes, scheme, scheme_weights, kind)
      for axes, kind in zip(row, KINDS, strict=True)
    ]
    depth_bar(figure, mesh, list(row))
  return figure


def depth_panel(
  axes: axes_lib.Axes, scheme: str, weights: DepthWeights, kind: str
):
  """One heatmap: weights as multiples of uniform, on a logarithmic scale.

  A grey cell has the only source of its read, so that its weight must be 1.
  `kind` is one of `KINDS`. Returns the mesh, for `depth_bar`.
  """
  times = multiples(getattr(weights, kind))
  norm = colors.LogNorm(1 / _top(weights), _top(weights))
  single = np.isfinite(times).sum(axis=1, keepdims=True) == 1
  grey = np.where(single & np.isfinite(times), 0.5, np.nan)
  axes.pcolormesh(grey, cmap="Greys", vmin=0, vmax=1)
  times = np.where(single, np.nan, times)
  mesh = _heatmap(axes, times, weights.columns, norm=norm, cmap="RdBu_r")
  axes.set_title(f"{figures.name_of(scheme)}, {KINDS[kind]}")
  axes.set_xlabel("source")
  axes.set_ylabel("transformer block")
  return mesh


def depth_bar(figure: figure_lib.Figure, mesh: Any, axes: Any) -> None:
  """The colour bar of a mesh of `depth_panel`."""
  bar = figure.colorbar(mesh, ax=axes, pad=0.02, fraction=0.05)
  bar.outline.set_visible(False)
  top = round(np.log2(mesh.norm.vmax))
  powers = range(-top, top + 1)
  bar.set_ticks(
    [2.0**n for n in powers],
    labels=[f"{2**n}" if n >= 0 else f"1/{2**-n}" for n in powers],
  )
  bar.ax.minorticks_off()
  bar.set_label("weight / uniform")


def multiples(rows: np.ndarray) -> np.ndarray:
  """Weights [reads, sources] times the number of sources of their read."""
  return rows * np.isfinite(rows).sum(axis=1, keepdims=True)


def mixing_matrices(
  matrices: Mapping[str, np.ndarray], columns: int = 0
) -> figure_lib.Figure:
  """Depth mixing matrices side by side, as in Fig. 9, averaged over tokens.

  Args:
    matrices: by scheme, as `mixing_matrix` gives them.
    columns: matrices per row of the figure, each with its own colours: rows of
      schemes that sum grow with depth, rows of schemes that average do not. 0
      for all in one row, on one scale with a bar.
  """
  is_shared = not columns
  columns = columns or len(matrices)
  lines = -(-len(matrices) // columns)
  size = 2.7 if lines == 1 else 1.8
  figure = figure_lib.Figure(
    figsize=(size * columns, size * lines), layout="constrained"
  )
  grid = figure.subplots(lines, columns, squeeze=False)
  for axes in grid.flat[len(matrices) :]:
    axes.set_axis_off()
  visible = {
    scheme: np.where(np.tri(*matrix.shape, dtype=bool), matrix, np.nan)
    for scheme, matrix in matrices.items()
  }
  for axes, (scheme, matrix) in zip(grid.flat, visible.items()):
    scale = list(visible.values()) if is_shared else [matrix]
    low = min(0.0, *(float(np.nanmin(m)) for m in scale))
    # As an image: in a file of vectors, each cell would be a path.
    image = axes.imshow(
      matrix, cmap=_COLORMAP, interpolation="none",
      vmin=low, vmax=max(float(np.nanmax(m)) for m in scale),
    )  # fmt: skip
    if is_shared and axes is grid.flat[len(matrices) - 1]:
      figure.colorbar(image, ax=grid, label="coefficient of $v_i$ in $h_l$")
    _bare(axes)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(figures.name_of(scheme), fontsize=None if lines == 1 else 8)
  for axes in grid[-1]:
    axes.set_xlabel("value $v_i$")
  for axes in grid[:, 0]:
    axes.set_ylabel("read $h_l$")
  return figure


def magnitude_panel(
  axes: axes_lib.Axes, magnitudes: Mapping[str, Sequence[Magnitudes]], name: str
) -> None:
  """Magnitude (`state_rms` or `grad_norm`) per block (Fig. 5b and 5c).

  The mean of several measurements is the line, their extremes the shade.
  """
  for scheme, several in magnitudes.items():
    _line(axes, scheme, [getattr(measurement, name) for measurement in several])
  title, label = {
    "state_rms": ("Output magnitude", "RMS of the running state"),
    "grad_norm": ("Gradient magnitude", "norm of the block's gradient"),
  }[name]
  axes.set_title(title)
  axes.set_ylabel(label)
  axes.set_xlabel("transformer block")
  axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  axes.set_yscale("log")
  _plain_log_ticks(axes)
  figures.style(axes)


def _line(
  axes: axes_lib.Axes, scheme: str, series: Sequence[np.ndarray]
) -> None:
  array = np.stack(series)
  x = np.arange(1, array.shape[1] + 1)
  drawn = figures.style_of(scheme)
  axes.plot(
    x,
    array.mean(0),
    marker="o",
    markersize=3,
    label=figures.name_of(scheme),
    **drawn,
  )
  if len(series) > 1:
    axes.fill_between(
      x, array.min(0), array.max(0), color=drawn["color"], alpha=0.15, lw=0
    )


def _plain_log_ticks(axes: axes_lib.Axes) -> None:
  """Numbers such as 0.02 and 0.05 rather than powers of ten."""
  locator = ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=12)
  axes.yaxis.set_major_locator(locator)
  axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:g}"))
  axes.yaxis.set_minor_locator(ticker.NullLocator())


def _top(weights: DepthWeights) -> float:
  """The end of the colour scale of both panels: a power of two, from 2 to 8."""
  both = np.concatenate([multiples(getattr(weights, kind)) for kind in KINDS])
  largest = max(1.0, float(np.nanmax(both)))
  return 2.0 ** min(3, max(1, np.ceil(np.log2(largest))))


def _heatmap(
  axes: axes_lib.Axes, array: np.ndarray, columns: Sequence[str], **drawn: Any
):
  mesh = axes.pcolormesh(array, **drawn)
  axes.invert_yaxis()
  _bare(axes)
  rows, width = array.shape
  axes.set_yticks(np.arange(rows) + 0.5, [str(i + 1) for i in range(rows)])
  shown = range(0, width, 1 if width <= 10 else 2)
  axes.set_xticks([i + 0.5 for i in shown], [_short(columns[i]) for i in shown])
  return mesh


def _bare(axes: axes_lib.Axes) -> None:
  axes.tick_params(length=0)
  for spine in axes.spines.values():
    spine.set_visible(False)


def _short(column: str) -> str:
  """embedding, sublayer 3, block 2 -> emb, 3, b2."""
  kind, _, number = column.partition(" ")
  return {"embedding": "emb", "sublayer": number}.get(kind, kind[0] + number)
