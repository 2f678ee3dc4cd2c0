# SPDX-License-Identifier: Apache-2.0
"""Fig. 4 and Fig. 7 in the paper's layout, with our and their numbers.

Losses on other data, tokenizers and scales cannot share an axis with the
paper's, so Fig. 4 has two panels: slopes and gaps can be compared, values
cannot. Every compute axis names its way of counting.

matplotlib is imported by the functions that draw.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.analysis import figures
from attnres_jax.scaling import compute as compute_lib
from attnres_jax.scaling import fit as fit_lib
from attnres_jax.scaling import paper


def draw_scaling(
  runs: Mapping[str, fit_lib.Runs],
  fits: Mapping[str, fit_lib.Fit],
  counting: str,
  *,
  ax: Any = None,
  advantage: tuple[str, str, float] | None = None,
  title: str = "",
) -> Any:
  """Axes with losses over compute, fitted lines and bands.

  Args:
    runs: points of each scheme.
    fits: lines of each scheme; a band where it has draws.
    counting: which of `compute.COUNTINGS` the compute is.
    ax: axes to draw on; new ones by default.
    advantage: baseline, other scheme, and the compute at which to mark how much
      more the baseline needs.
    title: of the axes.
  """
  from matplotlib import ticker

  if counting not in compute_lib.COUNTINGS:
    config_lib.fail_argument(
      "counting", counting, ", ".join(compute_lib.COUNTINGS)
    )
  if ax is None:
    from matplotlib import pyplot as plt

    _, ax = plt.subplots(figsize=(5, 4), layout="constrained")
  every = np.concatenate([arm.compute for arm in runs.values()])
  grid = np.geomspace(every.min() / 1.15, every.max() * 1.35, 100)
  for scheme, arm in runs.items():
    style = figures.look_of(scheme)
    ax.plot(
      arm.compute, arm.loss, style.marker, color=style.colour,
      markersize=5, markerfacecolor="none",
      # If there is a line, it has the label.
      label="_points" if scheme in fits else style.label,
    )  # fmt: skip
  for scheme, fit in fits.items():
    style, law = figures.look_of(scheme), fit.law
    formula = f"{law.coefficient:.3f} $C^{{-{law.exponent:.3f}}}$"
    label = f"{style.label}: {formula}"
    ax.plot(grid, law(grid), color=style.colour, linewidth=1.3, label=label)
    if fit.samples:
      losses = [fit.loss(compute) for compute in grid]
      low = np.array([loss.low for loss in losses])
      high = np.array([loss.high for loss in losses])
      ax.fill_between(grid, low, high, color=style.colour, alpha=0.12, lw=0)
  figures.logarithmic(ax)
  if grid[-1] / grid[0] < 100:
    ax.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
  ax.set_xlabel(f"PFLOP/s-days ({compute_lib.LABELS[counting]})")
  ax.set_ylabel("validation loss")
  figures.style(ax)
  if advantage is not None:
    _mark_advantage(ax, fits, *advantage)
  if runs:
    ax.legend(fontsize=8, frameon=False, loc="upper right")
  ax.set_title(title, loc="left", fontsize=10)
  return ax


def figure_4(
  runs: Mapping[str, fit_lib.Runs],
  fits: Mapping[str, fit_lib.Fit],
  counting: str,
  *,
  title: str = "this repository",
  figsize: tuple[float, float] = (10.5, 4.2),
) -> Any:
  """Our scaling law beside the paper's; arguments as of `draw_scaling`."""
  from matplotlib import figure as figure_lib

  figure = figure_lib.Figure(figsize=figsize, layout="constrained")
  ours, theirs = figure.subplots(1, 2)
  advantage = None
  if len(fits) > 1:
    baseline, other, *_ = fits
    largest = max(arm.compute.max() for arm in runs.values())
    advantage = baseline, other, float(largest)
  draw_scaling(runs, fits, counting, ax=ours, title=title, advantage=advantage)
  draw_paper(ax=theirs)
  return figure


def draw_paper(counting: str = "attention", *, ax: Any = None) -> Any:
  """Fig. 4 from Table 2, counted in this way, and the printed laws."""
  fits = {
    scheme: fit_lib.Fit(law) for scheme, law in paper.PUBLISHED_LAWS.items()
  }
  return draw_scaling(
    {scheme: paper.runs(scheme, counting) for scheme in fits},
    fits,
    counting,
    ax=ax,
    advantage=("prenorm", "block_attnres", paper.PUBLISHED_COMPUTE),
    title="arXiv:2603.15031: Table 2 and printed fits",
  )


def figure_7(
  losses: Mapping[str, np.ndarray],
  *,
  widths_per_layer=paper.WIDTHS_PER_LAYER,
  heads_per_layer=paper.HEADS_PER_LAYER,
) -> Any:
  """Loss over the shape of the network, a heatmap per scheme.

  All heatmaps share one colour scale. A filled star marks the best cell, a
  hollow star the paper's best if the grid has that cell. Missing cells are
  blank. Losses are [widths per layer, heads per layer]; NaN without a run.
  """
  from matplotlib import figure as figure_lib

  shape = len(widths_per_layer), len(heads_per_layer)
  tables = {}
  for scheme, table in losses.items():
    tables[scheme] = np.asarray(table, float)
    if tables[scheme].shape != shape:
      config_lib.fail_argument(
        f"losses[{scheme!r}]",
        tables[scheme].shape,
        f"an array of shape {shape}",
      )
  finite = np.concatenate([t[np.isfinite(t)] for t in tables.values()])
  figure = figure_lib.Figure(
    figsize=(1.2 + 3.9 * len(tables), 3.8), layout="constrained"
  )
  axes = figure.subplots(1, len(tables), sharey=True, squeeze=False)
  image = None
  for ax, (scheme, table) in zip(axes[0], tables.items()):
    image = ax.imshow(
      table, cmap="viridis_r", origin="lower", aspect="auto",
      vmin=finite.min(), vmax=finite.max(),
    )  # fmt: skip
    middle = (finite.min() + finite.max()) / 2
    for (row, column), loss in np.ndenumerate(table):
      if np.isfinite(loss):
        # High losses are dark in this colour map.
        ink = "white" if loss > middle else "black"
        ax.text(
          column, row - 0.18, f"{loss:.3f}", ha="center", va="center",
          fontsize=8, color=ink,
        )  # fmt: skip
    if np.isfinite(table).any():
      row, column = np.unravel_index(np.nanargmin(table), shape)
      ax.plot(column, row + 0.22, "*", color="#d62728", markersize=11)
    _mark_paper_optimum(ax, scheme, widths_per_layer, heads_per_layer)
    ax.set_xticks(range(shape[1]), [f"{x:g}" for x in heads_per_layer])
    ax.set_yticks(range(shape[0]), [f"{y:g}" for y in widths_per_layer])
    ax.set_xlabel("heads / layers")
    ax.set_title(figures.look_of(scheme).label, fontsize=10)
  axes[0][0].set_ylabel("width / layers")
  if image is not None:
    figure.colorbar(image, ax=axes, label="validation loss", pad=0.01)
  return figure


def _mark_advantage(
  ax: Any,
  fits: Mapping[str, fit_lib.Fit],
  baseline: str,
  other: str,
  compute: float,
) -> None:
  """An arrow from the other scheme's line to the baseline's, at one loss."""
  import matplotlib

  loss = fits[other].law(compute)
  ratio = fit_lib.compute_advantage(fits[baseline], fits[other], compute)
  if not np.isfinite(ratio.value):
    return
  text = f"{ratio.value:.2f}x compute"
  if ratio.low is not None:
    text += f" [{ratio.low:.2f}, {ratio.high:.2f}]"
  ax.annotate(
    "",
    xy=(compute * ratio.value, loss),
    xytext=(compute, loss),
    arrowprops=dict(
      arrowstyle="->", color=matplotlib.rcParams["text.color"], linewidth=1.0
    ),
  )
  ax.text(
    0.03, 0.04,
    f"for the loss of {figures.look_of(other).label} at {compute:.3g}\n"
    f"{figures.look_of(baseline).label} needs {text}",
    transform=ax.transAxes, fontsize=8, va="bottom",
  )  # fmt: skip


def _mark_paper_optimum(ax, scheme, widths_per_layer, heads_per_layer) -> None:
  best = paper.FIG_7_OPTIMA.get(scheme)
  if (
    best
    and best.width_per_layer in widths_per_layer
    and (best.heads_per_layer in heads_per_layer)
  ):
    ax.plot(
      list(heads_per_layer).index(best.heads_per_layer),
      list(widths_per_layer).index(best.width_per_layer) + 0.22,
      "*", markerfacecolor="none", markeredgecolor="black", markersize=15,
    )  # fmt: skip
