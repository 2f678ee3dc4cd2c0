# SPDX-License-Identifier: Apache-2.0
"""Figures of the paper's analysis, for reports and notebooks.

Needs matplotlib (`pip install "attnres-jax[plots]"`). Every function returns a
new figure, independent of pyplot's state.
"""

from collections.abc import Mapping, Sequence

from matplotlib import axes as axes_lib
from matplotlib import figure as figure_lib
from matplotlib import ticker
import numpy as np

from attnres_jax.analysis import figures
from attnres_jax.analysis.depth_weights import DepthWeights
from attnres_jax.analysis.magnitudes import Magnitudes

_COLORMAP = "viridis"


def depth_weights(
  weights: Mapping[str, DepthWeights],
) -> figure_lib.Figure:
  """Heatmaps in the layout of Fig. 8: a row per scheme, attention and MLP."""
  height = 2.9 * len(weights) + 0.2
  figure = figure_lib.Figure(figsize=(8.4, height), layout="constrained")
  grid = figure.subplots(len(weights), 2, squeeze=False)
  for row, (scheme, found) in zip(grid, weights.items(), strict=True):
    top = _largest_choice(found)
    for axes, kind in zip(row, ("attention", "mlp"), strict=True):
      mesh = _heatmap(axes, getattr(found, kind), found.columns, top)
      label = {"attention": "pre-attention", "mlp": "pre-MLP"}[kind]
      axes.set_title(f"{figures.name_of(scheme)}, {label}")
    row[0].set_ylabel("transformer block")
    extend = "max" if top < 1 else "neither"
    bar = figure.colorbar(
      mesh, ax=list(row), pad=0.02, fraction=0.04, extend=extend
    )
    bar.outline.set_visible(False)
    bar.set_label("mean weight")
  for axes in grid[-1]:
    axes.set_xlabel("source")
  return figure


def mixing_matrices(
  matrices: Mapping[str, np.ndarray], columns: int = 0
) -> figure_lib.Figure:
  """Depth mixing matrices side by side, as in Fig. 9, averaged over tokens.

  Every matrix has its own colour scale: rows of schemes that sum grow with
  depth, rows of schemes that average do not.

  Args:
    matrices: by scheme, as `mixing_matrix` gives them.
    columns: matrices per row of the figure; 0 for all.
  """
  columns = columns or len(matrices)
  lines = -(-len(matrices) // columns)
  size = 2.7 if lines == 1 else 1.8
  figure = figure_lib.Figure(
    figsize=(size * columns, size * lines), layout="constrained"
  )
  grid = figure.subplots(lines, columns, squeeze=False)
  for axes in grid.flat[len(matrices) :]:
    axes.set_axis_off()
  for axes, (scheme, matrix) in zip(grid.flat, matrices.items()):
    visible = np.where(np.tri(*matrix.shape, dtype=bool), matrix, np.nan)
    low = min(0.0, float(np.nanmin(visible)))
    # As an image: in a file of vectors, each cell would be a path.
    axes.imshow(visible, cmap=_COLORMAP, vmin=low, interpolation="none")
    _bare(axes)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(figures.name_of(scheme), fontsize=None if lines == 1 else 8)
  for axes in grid[-1]:
    axes.set_xlabel("value $v_i$")
  for axes in grid[:, 0]:
    axes.set_ylabel("read $h_l$")
  return figure


def magnitudes(
  found: Mapping[str, Sequence[Magnitudes]],
) -> figure_lib.Figure:
  """Output and gradient magnitude per transformer block (Fig. 5b and 5c).

  Args:
    found: per scheme, one or more measurements (batches, seeds); their mean is
      the line, their extremes the shade around it.
  """
  figure = figure_lib.Figure(figsize=(8.4, 3.3), layout="constrained")
  left, right = figure.subplots(1, 2)
  for scheme, several in found.items():
    _line(left, scheme, [m.state_rms for m in several])
    _line(right, scheme, [m.grad_norm for m in several])
  left.set_title("Output magnitude")
  left.set_ylabel("RMS of the running state")
  right.set_title("Gradient magnitude")
  right.set_ylabel("norm of the block's gradient")
  for axes in (left, right):
    axes.set_xlabel("transformer block")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.set_yscale("log")
    _plain_log_ticks(axes)
    figures.style(axes)
  figures.legend(figure, left)
  return figure


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


def _largest_choice(found: DepthWeights) -> float:
  """The largest weight of a row with a choice, rounded up to a tenth."""
  rows = [*found.attention[1:], *found.mlp]
  return min(1.0, float(np.ceil(10 * np.nanmax(rows)) / 10))


def _heatmap(
  axes: axes_lib.Axes, array: np.ndarray, columns: Sequence[str], top: float
):
  mesh = axes.pcolormesh(array, cmap=_COLORMAP, vmin=0, vmax=top)
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
  return {"embedding": "emb", "sublayer": number, "block": f"b{number}"}[kind]
