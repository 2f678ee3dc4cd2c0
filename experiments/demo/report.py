# SPDX-License-Identifier: Apache-2.0
"""The demo's report: one self-contained HTML file."""

from collections.abc import Mapping, Sequence
import pathlib
import statistics
from typing import Any

from matplotlib import figure as figure_lib

from attnres_jax import config as config_lib
from attnres_jax.analysis import figures
from attnres_jax.analysis import plots
from attnres_jax.train import account
from experiments.demo import inspection
from experiments.demo import results
from experiments.pages import curves
from experiments.pages import page
from experiments.pages import svg as svg_lib

_BODY = pathlib.Path(__file__).with_name("report_page.html")


def render(
  *,
  config: config_lib.RunConfig,
  runs: Sequence[results.Run],
  looks: Sequence[inspection.Look],
  rows: Sequence[results.Row],
  facts: Mapping[str, Any],
) -> str:
  """The page.

  Args:
    config: of any of the runs; they differ in residual and seed only.
    runs: all runs, seed by seed.
    looks: the analysis of each run, in the same order.
    rows: of the runs, as in results.csv.
    facts: hardware and versions, see `attnres_jax.common.environment.facts`.
  """
  inside: dict[str, list[inspection.Look]] = {}
  for run, look in zip(runs, looks, strict=True):
    inside.setdefault(run.scheme, []).append(look)
  weights = {
    scheme: found[0].depth_weights
    for scheme, found in inside.items()
    if found[0].depth_weights is not None
  }
  magnitudes = {
    scheme: [look.magnitudes for look in found]
    for scheme, found in inside.items()
  }
  with svg_lib.style():
    svg = {
      "loss_figure": svg_lib.to_svg(_losses(runs), "loss"),
      "magnitude_figure": svg_lib.to_svg(
        plots.magnitudes(magnitudes), "magnitudes"
      ),
      "depth_figure": svg_lib.to_svg(plots.depth_weights(weights), "depth"),
    }
  parts = {
    "summary": _summary(config, rows, facts),
    "table": results.table(rows).html(),
    "coincide": _coincide(rows),
    "samples": _samples(inside),
    "facts": _facts(config, runs, facts),
  }
  return page.render("Attention Residuals, side by side", _BODY, parts | svg)


def _summary(
  config: config_lib.RunConfig,
  rows: Sequence[results.Row],
  facts: Mapping[str, Any],
) -> str:
  schemes = list(dict.fromkeys(row["scheme"] for row in rows))
  seeds = len(results.losses(rows, schemes[0]))
  tokens = account.tokens_of(config)
  mean = {
    s: statistics.fmean(loss for _, loss in results.losses(rows, s))
    for s in schemes
  }
  best = min(schemes, key=lambda scheme: mean[scheme])
  apart = results.differences(rows, best)
  verdict = ""
  if apart and statistics.fmean(apart) < 0:
    verdict = (
      f" {figures.name_of(best)} ends lowest,"
      f" {page.signed(statistics.fmean(apart))} nats per byte from PreNorm."
    )
  return (
    f"{len(schemes)} schemes, {seeds} seed{'s' * (seeds > 1)} each,"
    f" {config.model.num_layers} transformer blocks"
    f" ({config.model.num_sublayers} sublayers) of width {config.model.width},"
    f" {tokens:,} tokens of text per run, on {facts['hardware']}.{verdict}"
  )


def _losses(runs: Sequence[results.Run]) -> figure_lib.Figure:
  """Losses in training and in validation, and their differences."""
  panels: dict[str, dict[str, dict[int, curves.Series]]] = {}
  for run in runs:
    for panel, series in zip(
      ("Training", "Validation"), (run.train, run.validation)
    ):
      own = panels.setdefault(panel, {}).setdefault(run.scheme, {})
      own[run.seed] = series
  figure = curves.draw(panels)
  assert figure is not None
  return figure


def _coincide(rows: Sequence[results.Row]) -> str:
  """The difference between PreNorm and Rescaled, if both were trained."""
  apart = results.differences(rows, "rescaled")
  if not apart:
    return ""
  most = max(map(abs, apart))
  return f" Here their final validation losses differ by up to {most:.4f}."


def _samples(inside: Mapping[str, Sequence[inspection.Look]]) -> page.Html:
  return page.join(
    page.fill(
      "<figure><figcaption>$scheme</figcaption>"
      "<pre><b>$prompt</b>$sample</pre></figure>\n",
      scheme=page.label(figures.name_of(scheme)),
      prompt=found[0].prompt,
      sample=found[0].sample,
    )
    for scheme, found in inside.items()
  )


def _facts(
  config: config_lib.RunConfig,
  runs: Sequence[results.Run],
  facts: Mapping[str, Any],
) -> page.Html:
  optim = config.optim
  block_size = config.model.residual.sublayers_per_block(
    config.model.num_sublayers
  )
  listed = {
    "Hardware": facts["hardware"],
    "System": facts["system"],
    "Software": (
      f"Python {facts['python']}, jax {facts['jax']}, flax {facts['flax']}"
    ),
    "Commit": facts["commit"],
    "Date": facts["date"],
    "Text": facts["corpus"],
    "Network": (
      f"{config.model.num_layers} transformer blocks, width"
      f" {config.model.width}, {config.model.num_heads} heads, MLP width"
      f" {config.model.mlp_size}, {config.model.dtype}; Block AttnRes with"
      f" {block_size} sublayers per block"
    ),
    "Training": (
      f"{config.train.steps} steps of {config.data.batch_size} x"
      f" {config.data.sequence_length} bytes; {optim.name},"
      f" {optim.schedule} schedule, peak learning rate {optim.peak_lr:g},"
      f" warm-up {optim.warmup_steps} steps, weight decay"
      f" {optim.weight_decay:g}, clipping at {optim.clip_norm:g}; the same for"
      " all schemes, not tuned for any"
    ),
    "Validation": (
      f"the same {config.train.eval_batches} batches"
      f" ({config.train.eval_batches * config.data.batch_size} rows) of files"
      " that are not in the training split"
    ),
    "Time": (
      f"{sum(int(run.row['run_seconds']) for run in runs)} s of training,"
      " evaluation and compilation"
    ),
  }
  return page.facts(listed)
