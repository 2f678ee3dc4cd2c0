# SPDX-License-Identifier: Apache-2.0
"""The paper's observations on Fig. 8 as numbers, and the figures.

All numbers are means over reads with at least three sources. A weight is given
relative to an even one, 1 / n for n sources, since reads have different n.
"""

from collections.abc import Callable, Mapping, Sequence
import json
from typing import NamedTuple

from matplotlib import figure as figure_lib
import numpy as np
from scipy import stats

from attnres_jax import analysis
from attnres_jax.analysis import figures
from attnres_jax.analysis import plots
from experiments import trained
from experiments.ablations import config as ablations
from experiments.pages import page

VARIANTS = ("full", "block")
ATTENTION, MLP = "attention", "mlp"
# How many times an even weight a source beyond the two newest has to have.
_SKIP = 1.5

Row = Mapping[str, str]


class Reads(NamedTuple):
  """The reads of one kind of sublayer that have at least three sources.

  Attributes:
    weights: of each read, its sources in order, the embedding first.
    entropies: of each read, in nats.
  """

  weights: list[np.ndarray]
  entropies: list[float]


def results(rows: Sequence[Row]) -> str:
  """For the README: an observation per line, a variant and kind per column."""
  header = [""]
  columns = []
  for variant in VARIANTS:
    own = [row for row in rows if row["variant"] == variant]
    for kind, name in ((ATTENTION, "pre-attention"), (MLP, "pre-MLP")):
      if own:
        header.append(f"{trained.label(variant)}, {name}")
        columns.append([reads(row, kind) for row in own])
  lines = [
    [
      label,
      *(trained.spread([number(one) for one in column]) for column in columns),
    ]
    for label, number in OBSERVATIONS.items()
  ]
  parts = [page.Table(header, lines), _removal_table(rows)]
  parts = [part.markdown() for part in parts]
  origin = (
    f"Means over seeds {trained.seeds(rows)}, and their range;"
    f" {trained.origin(rows)}"
  )
  return "\n\n".join([*parts, origin])


def reads(row: Row, kind: str) -> Reads:
  """The reads of attention sublayers or of MLPs of one network."""
  found = Reads([], [])
  entropies = json.loads(row[f"{kind}_entropy"])
  for cells, entropy in zip(json.loads(row[kind]), entropies, strict=True):
    own = np.asarray([x for x in cells if x is not None])
    if len(own) > 2:
      found.weights.append(own)
      found.entropies.append(entropy)
  return found


def newest(found: Reads) -> float:
  """Weight of the newest source, relative to an even one."""
  return float(np.mean([own[-1] * len(own) for own in found.weights]))


def newest_is_largest(found: Reads) -> float:
  """Share of reads whose newest source has the largest weight."""
  return float(np.mean([own.argmax() == len(own) - 1 for own in found.weights]))


def embedding(found: Reads) -> float:
  """Weight of the embedding, relative to an even one."""
  return float(np.mean([own[0] * len(own) for own in found.weights]))


def evenness(found: Reads) -> float:
  """Mean entropy of a token's weights over that of even ones."""
  lengths = [len(own) for own in found.weights]
  return float(np.mean(np.asarray(found.entropies) / np.log(lengths)))


def skips(found: Reads) -> float:
  """Share of sources, without the embedding and the two newest, that are read
  with `_SKIP` times an even weight.
  """
  far = [own[1:-2] * len(own) > _SKIP for own in found.weights]
  every = np.concatenate(far)
  return float(every.mean()) if len(every) else float("nan")


OBSERVATIONS: Mapping[str, Callable[[Reads], float]] = {
  "1. weight of the newest source (1 is even)": newest,
  "1. reads whose newest source has the largest weight": newest_is_largest,
  "2. weight of the embedding (1 is even)": embedding,
  "3., 4. entropy over that of even weights": evenness,
  f"skips: older sources with {_SKIP} times an even weight": skips,
}


def heatmaps(rows: Sequence[Row]) -> figure_lib.Figure:
  """Fig. 8 of the first seed: a row per variant."""
  found = {}
  for row in rows:
    if row["variant"] not in found:
      found[row["variant"]] = analysis.DepthWeights(
        attention=_array(row[ATTENTION]),
        mlp=_array(row[MLP]),
        output=_array(row["output"]),
        columns=tuple(json.loads(row["columns"])),
        output_columns=tuple(json.loads(row["output_columns"])),
        attention_entropy=_array(row["attention_entropy"]),
        mlp_entropy=_array(row["mlp_entropy"]),
        output_entropy=float(row["output_entropy"]),
      )
  schemes = {
    ablations.STUDY.variants[variant].residual: weights
    for variant, weights in found.items()
  }
  return plots.depth_weights(schemes)


def importances(rows: Sequence[Row]) -> figure_lib.Figure:
  """What removing a source from a read costs, over its weight."""
  shape = figure_lib.Figure(figsize=(7.4, 3.6), layout="constrained")
  axes = shape.subplots()
  for variant in VARIANTS:
    own = [row for row in rows if row["variant"] == variant]
    style = figures.style_of(ablations.STUDY.variants[variant].residual)
    for index, row in enumerate(own):
      weight, cost = removed(row)
      axes.plot(
        weight, np.maximum(cost, 1e-5), ".", color=style["color"], alpha=0.5,
        markersize=4, label=trained.label(variant) if index == 0 else None,
      )  # fmt: skip
  axes.set_xscale("log")
  axes.set_yscale("log")
  axes.set_xlabel("mean weight of a source in a read")
  axes.set_ylabel("loss without it, less the loss,\nnats per token")
  figures.style(axes)
  figures.legend(shape, axes)
  return shape


def removed(row: Row) -> tuple[np.ndarray, np.ndarray]:
  """Weights, and costs of removal, of all sources of reads with a choice."""
  cost, weight = _array(row["importance"]), _array(row["read_weights"])
  chosen = np.sum(~np.isnan(cost), axis=1) > 1
  exists = ~np.isnan(cost) & ~np.isnan(weight) & chosen[:, None]
  return weight[exists], cost[exists]


def _removal_table(rows: Sequence[Row]) -> page.Table:
  """How weights and costs agree."""
  lines = []
  for variant in VARIANTS:
    own = [removed(row) for row in rows if row["variant"] == variant]
    if own:
      lines.append(
        [
          trained.label(variant),
          trained.spread([stats.spearmanr(*one).statistic for one in own]),
          trained.spread([_share_of_top(*one) for one in own]),
          trained.spread([float(np.max(one[1])) for one in own], 3),
        ]
      )
  header = (
    "removal of one source from one read", "rank correlation with its weight",
    "share of all costs in the tenth with the largest weights",
    "largest cost, nats per token",
  )  # fmt: skip
  return page.Table(header, lines)


def _share_of_top(weight: np.ndarray, cost: np.ndarray) -> float:
  top = weight >= np.quantile(weight, 0.9)
  return float(np.abs(cost[top]).sum() / np.abs(cost).sum())


def _array(text: str) -> np.ndarray:
  return np.asarray(json.loads(text), np.float64)
