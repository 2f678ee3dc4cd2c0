# SPDX-License-Identifier: Apache-2.0
"""Figures 5, 8 and 9 as numbers and pictures, from the rows.

Numbers of reads are means over reads with at least three sources. A weight is
given relative to an even one, 1 / n for n sources, since n differs.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
from typing import Any

from matplotlib import figure as figure_lib
import numpy as np
from scipy import stats

from attnres_jax import analysis
from attnres_jax.analysis import figures
from attnres_jax.analysis import plots
from attnres_jax.sweep.pages import page
from experiments.ablations import config as ablations
from experiments.pages import readme

BASELINE = "prenorm"
VARIANTS = tuple(name for name in ablations.STUDY.variants if name != "control")
# Those whose magnitudes and whose reads are measured.
SIZES, READERS = (BASELINE, "block", "full"), ("full", "block")
MAGNITUDES = {
  "state_rms": "running state after a block",
  "read_rms": "input of a sublayer",
  "output_rms": "output of a sublayer",
  "grad_norm": "gradient of a block's parameters",
  "output_grad_rms": "gradient by a sublayer's output",
}
_KINDS = {"attention": "pre-attention", "mlp": "pre-MLP"}
# How many times an even weight a source beyond the two newest has to have.
_SKIP = 1.5

Row = Mapping[str, Any]


def of_series(rows: Sequence[Row], series: str) -> dict[str, dict[int, Any]]:
  """The values of one series, by variant and seed."""
  by_variant: dict[str, dict[int, Any]] = {}
  for row in rows:
    if row["series"] == series:
      values = json.loads(row["values"])
      by_variant.setdefault(row["variant"], {})[int(row["seed"])] = values
  return {name: by_variant[name] for name in VARIANTS if name in by_variant}


def label(variant: str) -> str:
  """The name of a variant in tables and figures."""
  return ablations.STUDY.variants[variant].label


def _style(variant: str) -> dict[str, Any]:
  return figures.style_of(ablations.STUDY.variants[variant].residual)


def _spread(values: Sequence[float], digits: int = 2) -> str:
  """The mean over networks, and their range if there are several."""
  ends = (min(values), max(values)) if len(values) > 1 else (None, None)
  mean = float(np.mean(values))
  return str(page.interval(mean, *ends, digits, page.RANGE))


def _origin(rows: Sequence[Row], *series: str) -> str:
  """The seeds and the origin of the rows of some series."""
  used = [row for row in rows if row["series"] in series]
  seeds = {
    label(name): ", ".join(map(str, sorted(by_seed)))
    for name, by_seed in of_series(used, series[0]).items()
  }
  text = "; ".join(f"{name} {seen}" for name, seen in seeds.items())
  return f"Seeds: {text}. {readme.origin(used)}"


def magnitudes(rows: Sequence[Row]) -> str:
  """Last over first block, and largest over smallest."""
  lines = []
  for words, ratio in (
    ("last over first", lambda x: x[-1] / x[0]),
    ("largest over smallest", lambda x: max(x) / min(x)),
  ):
    for variant in of_series(rows, "state_rms"):
      cells = [
        _spread([ratio(x) for x in of_series(rows, size)[variant].values()])
        for size in MAGNITUDES
      ]
      lines.append([f"{label(variant)}, {words}", *cells])
  table = page.Table(["", *MAGNITUDES.values()], lines)
  return readme.text(table, _origin(rows, "state_rms"))


# Of a read: its weights in the order of sources, the embedding first, and their
# entropy in nats. A number, or one for each of some sources.
OBSERVATIONS: Mapping[str, Callable[[np.ndarray, float], Any]] = {
  "1. weight of the newest source (1 is even)": lambda w, _: w[-1] * len(w),
  "1. reads whose newest source has the largest weight": lambda w, _: (
    w.argmax() == len(w) - 1
  ),
  "2. weight of the embedding (1 is even)": lambda w, _: w[0] * len(w),
  "3., 4. entropy over that of even weights": lambda w, entropy: (
    entropy / np.log(len(w))
  ),
  f"skips: older sources with {_SKIP} times an even weight": lambda w, _: (
    w[1:-2] * len(w) > _SKIP
  ),
}


def observed(weights: Any, entropies: Any) -> list[float]:
  """Means of all observations over reads with at least three sources.

  Absent sources have the weight None.
  """
  reads = [
    (row, entropy)
    for cells, entropy in zip(weights, entropies, strict=True)
    if len(row := np.asarray([x for x in cells if x is not None])) > 2
  ]
  every = (
    np.hstack([number(*read) for read in reads])
    for number in OBSERVATIONS.values()
  )
  return [float(x.mean()) if len(x) else float("nan") for x in every]


def patterns(rows: Sequence[Row]) -> str:
  """An observation per line, a variant and kind per column; and removals."""
  columns = {}
  for variant in of_series(rows, "mlp"):
    for kind, words in _KINDS.items():
      weights, entropies = (
        of_series(rows, name)[variant] for name in (kind, f"{kind}_entropy")
      )
      seeds = [observed(weights[seed], entropies[seed]) for seed in weights]
      columns[f"{label(variant)}, {words}"] = map(_spread, zip(*seeds))
  removals = [
    [
      label(variant),
      _spread([stats.spearmanr(*x).statistic for x in by_seed]),
      _spread([_share_of_top(*x) for x in by_seed]),
      _spread([float(np.max(cost)) for _, cost in by_seed], 3),
    ]
    for variant, by_seed in _removed(rows).items()
  ]
  header = (
    "removal of one source from one read", "rank correlation with its weight",
    "share of all costs in the tenth with the largest weights",
    "largest cost, nats per token",
  )  # fmt: skip
  return readme.text(
    page.Table(["", *columns], [*zip(OBSERVATIONS, *columns.values())]),
    page.Table(header, removals),
    _origin(rows, "mlp", "importance"),
  )


def removed(importance: Any, weights: Any) -> tuple[np.ndarray, np.ndarray]:
  """Weights, and costs of removal, of all sources of reads with a choice."""
  cost, weight = (np.asarray(x, np.float64) for x in (importance, weights))
  chosen = np.sum(~np.isnan(cost), axis=1) > 1
  exists = ~np.isnan(cost) & ~np.isnan(weight) & chosen[:, None]
  return weight[exists], cost[exists]


def _removed(rows: Sequence[Row]) -> dict[str, list[Any]]:
  costs, weights = (
    of_series(rows, name) for name in ("importance", "read_weights")
  )
  return {
    name: [removed(cost, weights[name][seed]) for seed, cost in by_seed.items()]
    for name, by_seed in costs.items()
  }


def _share_of_top(weight: np.ndarray, cost: np.ndarray) -> float:
  top = weight >= np.quantile(weight, 0.9)
  return float(np.abs(cost[top]).sum() / np.abs(cost).sum())


def matrices(rows: Sequence[Row]) -> str:
  """Means over seeds of what describes a mixing matrix."""
  lines, ranks = [], of_series(rows, "rank")
  for variant, by_seed in of_series(rows, "matrix").items():
    measured = [numbers(np.asarray(matrix)) for matrix in by_seed.values()]
    cells = [f"{x:.2f}" for x in np.mean(measured, axis=0)]
    rank = " or ".join(map(str, sorted(set(ranks[variant].values()))))
    lines.append([label(variant), *cells, rank, str(len(by_seed))])
  header = (
    "residual", "share of the newest", "share of the embedding", "reach",
    "overlap with an even mixture", "rank", "networks",
  )  # fmt: skip
  return readme.text(page.Table(header, lines), _origin(rows, "matrix"))


def numbers(matrix: np.ndarray) -> tuple[float, float, float, float]:
  """Means over reads of at least three values, of shares of absolute weight.

  The share of the newest value, and the embedding's. The reach, which is the
  mean distance of a read (1 for the newest) over an even mixture's. The overlap
  with an even mixture, which PreNorm reads up to scale: 1 minus half the sum of
  absolute differences.
  """
  size = len(matrix)
  rows = np.arange(2, size)
  share = np.abs(matrix) / np.abs(matrix).sum(axis=1, keepdims=True)
  distance = rows[:, None] - np.arange(size)[None] + 1.0
  visible = distance > 0
  reach = np.sum(np.where(visible, share[rows] * distance, 0.0), axis=1)
  even = np.where(visible, 1.0 / (rows[:, None] + 1.0), 0.0)
  return (
    float(np.mean(share[rows, rows])),
    float(np.mean(share[rows, 0])),
    float(np.mean(reach / ((rows + 2.0) / 2))),
    float(np.mean(1 - np.abs(share[rows] - even).sum(axis=1) / 2)),
  )


def draw_weights(rows: Sequence[Row]) -> figure_lib.Figure:
  """Fig. 8 of the first seed: a row per variant."""
  schemes = {}
  for variant in of_series(rows, "mlp"):
    series: dict[str, Any] = {}
    for field in dataclasses.fields(analysis.DepthWeights):
      first, *_ = of_series(rows, field.name)[variant].values()
      is_text = "columns" in field.name
      series[field.name] = tuple(first) if is_text else np.float64(first)
    scheme = ablations.STUDY.variants[variant].residual
    schemes[scheme] = analysis.DepthWeights(**series)
  return plots.depth_weights(schemes)


def draw_importance(rows: Sequence[Row]) -> figure_lib.Figure:
  """What removing a source from a read costs, over its weight."""
  shape = figure_lib.Figure(figsize=(7.4, 3.6), layout="constrained")
  axes = shape.subplots()
  for variant, removals in _removed(rows).items():
    for index, (weight, cost) in enumerate(removals):
      axes.plot(
        weight, np.maximum(cost, 1e-5), ".", color=_style(variant)["color"],
        alpha=0.5, markersize=4, label=None if index else label(variant),
      )  # fmt: skip
  axes.set(xscale="log", yscale="log")
  axes.set_xlabel("mean weight of a source in a read")
  axes.set_ylabel("loss without it minus the loss,\nnats per token")
  figures.style(axes)
  figures.legend(shape, axes)
  return shape


def draw_matrices(rows: Sequence[Row]) -> figure_lib.Figure:
  """A matrix per variant, of its first seed."""
  first = {
    label(variant): np.asarray(next(iter(by_seed.values())))
    for variant, by_seed in of_series(rows, "matrix").items()
  }
  return plots.mixing_matrices(first, columns=4)


def draw_magnitudes(rows: Sequence[Row]) -> figure_lib.Figure:
  """Along depth: a line per network, the mean over seeds in front."""
  shape = figure_lib.Figure(figsize=(8.4, 5.6), layout="constrained")
  grid = list(shape.subplots(2, 3).flat)
  for axes, (series, title) in zip(grid, MAGNITUDES.items()):
    for variant, by_seed in of_series(rows, series).items():
      values = np.stack(list(by_seed.values()))
      x = np.arange(1, values.shape[1] + 1)
      style, thin = _style(variant), {"linewidth": 0.6, "alpha": 0.5}
      axes.plot(x, values.T, **style | thin)
      axes.plot(x, values.mean(0), label=label(variant), **style)
    axes.set_title(title, fontsize=9)
    of_block = series in ("state_rms", "grad_norm")
    axes.set_xlabel("transformer block" if of_block else "sublayer")
    axes.set_yscale("log")
    figures.style(axes)
  grid[-1].set_axis_off()
  figures.legend(shape, grid[0])
  return shape


PUBLISHED = readme.Published(
  __file__,
  [
    *(
      readme.Part(make, make.__name__)
      for make in (magnitudes, patterns, matrices)
    ),
    *(
      readme.Part(draw, document=f"{name}.svg")
      for name, draw in (
        ("magnitudes", draw_magnitudes),
        ("weights", draw_weights),
        ("importance", draw_importance),
        ("matrices", draw_matrices),
      )
    ),
  ],
)
