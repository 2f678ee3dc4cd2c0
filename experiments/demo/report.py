# SPDX-License-Identifier: Apache-2.0
"""The demo's report: one self-contained HTML file."""

from collections.abc import Mapping, Sequence
import math
import pathlib
import statistics
from typing import Any

from matplotlib import figure as figure_lib
import numpy as np

from attnres_jax import analysis
from attnres_jax import config as config_lib
from attnres_jax.analysis import figures
from attnres_jax.analysis import plots
from attnres_jax.train import account
from experiments.demo import inspection
from experiments.demo import results
from experiments.demo import step_time
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
  most = max(int(run.row["train_tokens"]) for run in runs)
  inside: dict[str, list[inspection.Look]] = {}
  compared: list[results.Run] = []
  for run, look in zip(runs, looks, strict=True):
    if int(run.row["train_tokens"]) == most:
      compared.append(run)
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
      "loss_figure": _losses(compared),
      "magnitude_figure": _magnitudes(magnitudes),
      "depth_figure": _depth(weights),
    }
  parts = {
    "summary": _summary(config, results.full(rows), facts),
    "gain": _gain(rows),
    "times": _times(results.full(rows)),
    "table": results.table(rows).html(),
    "coincide": _coincide(results.full(rows)),
    "samples": _samples(inside),
    "facts": _facts(config, runs, looks, facts),
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
      f" {-statistics.fmean(apart):.3f} nats per byte below PreNorm."
    )
  return (
    f"{len(schemes)} schemes, {seeds} seed{'s' * (seeds > 1)} each,"
    f" {config.model.num_layers} transformer blocks"
    f" ({config.model.num_sublayers} sublayers) of width {config.model.width},"
    f" {tokens:,} tokens of text per run, on {facts['hardware']}.{verdict}"
  )


def _gain(rows: Sequence[results.Row]) -> page.Html:
  """A sentence per scheme that attends over depth."""
  sentences = []
  for scheme in dict.fromkeys(row["scheme"] for row in rows):
    found = results.more_steps(rows, scheme)
    if found is None or scheme in (results.BASELINE, "rescaled"):
      continue
    low, high = (
      "no bound" if end is None or math.isinf(end) else f"{end:.0%}"
      for end in (found.low, found.high)
    )
    sentences.append(
      f"PreNorm needs **{found.value:.0%}** more steps to reach the loss of"
      f" {figures.name_of(scheme)}, between {low} and {high}."
    )
  return page.bold(" ".join(sentences))


def _times(rows: Sequence[results.Row]) -> str:
  busy = step_time.busy({row["scheme"]: row for row in rows})
  if busy:
    return f"Step times are not measured: {busy}."
  return (
    "Step times are relative to PreNorm, measured in turn within one process"
    " after training; in brackets, the range over rounds."
  )


def _losses(runs: Sequence[results.Run]) -> page.Html:
  """Losses in training and in validation, and their differences."""
  panels: dict[str, dict[str, dict[int, curves.Series]]] = {}
  for run in runs:
    for panel, series in zip(
      ("Training", "Validation"), (run.train, run.validation)
    ):
      own = panels.setdefault(panel, {}).setdefault(run.scheme, {})
      own[run.seed] = series
  return page.join(
    _panel(curves.draw({name: own}, width=4.6), name)
    for name, own in panels.items()
  )


def _panel(figure: Any, salt: str, text: str = "") -> page.Html:
  """A figure as wide as a phone, and a sentence below it."""
  return page.fill(
    "<div>{{ svg }}<p class=note>{{ text }}</p></div>\n",
    svg=svg_lib.to_svg(figure, salt),
    text=text,
  )


def _magnitudes(found: Mapping[str, Sequence[Any]]) -> page.Html:
  def draw(name):
    figure = figure_lib.Figure(figsize=(4.6, 3.4), layout="constrained")
    axes = figure.subplots()
    plots.magnitude_panel(axes, found, name)
    figures.legend(figure, axes, columns=2)
    return figure

  return page.join(_panel(draw(n), n) for n in ("state_rms", "grad_norm"))


def _depth(weights: Mapping[str, analysis.DepthWeights]) -> page.Html:
  def draw(scheme, found, kind):
    figure = figure_lib.Figure(figsize=(4.6, 3.0), layout="constrained")
    axes = figure.subplots()
    mesh = plots.depth_panel(axes, scheme, found, kind)
    plots.depth_bar(figure, mesh, axes)
    return figure

  return page.join(
    _panel(draw(scheme, found, kind), f"{scheme}{kind}", what(found, kind))
    for scheme, found in weights.items()
    for kind in plots.KINDS
  )


def what(found: analysis.DepthWeights, kind: str) -> str:
  """The largest preference and the largest neglect of a panel, in words."""
  rows = getattr(found, kind)
  times = np.where(
    np.isfinite(rows).sum(axis=1, keepdims=True) > 1,
    plots.multiples(rows),
    np.nan,
  )
  if not np.any(np.isfinite(times)):
    return "Every read has one source only."
  place = lambda index: np.unravel_index(index, times.shape)
  (row, column), (low, source) = (
    place(np.nanargmax(times)), place(np.nanargmin(times))
  )  # fmt: skip
  name = {"attention": "attention", "mlp": "the MLP"}[kind]
  return (
    f"The largest weight is {times[row, column]:.1f} times uniform:"
    f" {name} of transformer block {row + 1} reads {found.columns[column]}."
    f" The smallest is {times[low, source]:.1f} times uniform:"
    f" {found.columns[source]} in block {low + 1}."
  )


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
      "<figure><figcaption>{{ scheme }}</figcaption>"
      "<pre><b>{{ prompt }}</b>{{ sample }}</pre></figure>\n",
      scheme=page.label(figures.name_of(scheme)),
      prompt=found[0].prompt,
      sample=found[0].sample,
    )
    for scheme, found in inside.items()
  )


def _facts(
  config: config_lib.RunConfig,
  runs: Sequence[results.Run],
  looks: Sequence[inspection.Look],
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
      f"at the end, the whole split ({int(looks[0].validation['tokens']):,}"
      " bytes of files that are not in the training split); during training,"
      f" the same {config.train.eval_batches * config.data.batch_size} rows"
      " of it"
    ),
    "Time": (
      f"{sum(int(run.row['run_seconds']) for run in runs):,} s of training,"
      " evaluation and compilation"
    ),
  }
  return page.facts(listed)
