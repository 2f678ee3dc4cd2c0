# SPDX-License-Identifier: Apache-2.0
"""The demo's report: one HTML file that needs nothing else."""

from collections.abc import Mapping, Sequence
import html
import pathlib
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax.analysis import plots
from experiments.demo import figures
from experiments.demo import inspection
from experiments.demo import results
from experiments.pages import page
from experiments.pages import svg as svg_lib

_BODY = pathlib.Path(__file__).with_name("report_page.html")


def render(
  *,
  config: config_lib.RunConfig,
  runs: Sequence[results.Run],
  looks: Sequence[inspection.Look],
  step_seconds: Mapping[str, float],
  facts: Mapping[str, Any],
) -> str:
  """The page.

  Args:
    config: of any of the runs; they differ in residual and seed only.
    runs: all runs, those of one seed after those of the one before.
    looks: inside each run, in the same order.
    step_seconds: per scheme, measured side by side.
    facts: where all this was computed, see `attnres_jax.environment.facts`.
  """
  summaries = results.summarise(runs, step_seconds)
  groups = results.by_scheme(runs)
  inside = {
    scheme: [
      look
      for run, look in zip(runs, looks, strict=True)
      if run.scheme == scheme
    ]
    for scheme in groups
  }
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
      "loss_figure": svg_lib.to_svg(figures.loss_curves(groups), "loss"),
      "magnitude_figure": svg_lib.to_svg(
        plots.magnitudes(magnitudes), "magnitudes"
      ),
      "depth_figure": svg_lib.to_svg(plots.depth_weights(weights), "depth"),
    }
  parts = {
    "summary": _summary(config, summaries, facts),
    "table": _table(summaries),
    "coincide": _coincide(summaries),
    "samples": _samples(inside),
    "facts": _facts(config, runs, facts),
  }
  return page.render("Attention Residuals, side by side", _BODY, parts | svg)


def _summary(
  config: config_lib.RunConfig,
  summaries: Sequence[results.Summary],
  facts: Mapping[str, Any],
) -> str:
  seeds = len(summaries[0].losses)
  tokens = (
    config.train.steps * config.data.batch_size * config.data.sequence_length
  )
  best = min(summaries, key=lambda s: s.loss)
  verdict = ""
  if best.difference < 0:
    verdict = (
      f" {plots.name_of(best.scheme)} ends lowest,"
      f" {page.signed(best.difference)} nats per byte from PreNorm."
    )
  return html.escape(
    f"{len(summaries)} schemes, {seeds} seed{'s' * (seeds > 1)} each,"
    f" {config.model.num_layers} transformer blocks"
    f" ({config.model.num_sublayers} sublayers) of width {config.model.width},"
    f" {tokens:,} tokens of text per run, on {facts['hardware']}.{verdict}"
  )


def _table(summaries: Sequence[results.Summary]) -> str:
  best = min(summary.loss for summary in summaries)
  rows = []
  for summary in summaries:
    losses = ", ".join(f"{loss:.4f}" for loss in summary.losses)
    differences = ", ".join(page.signed(d) for d in summary.differences)
    mark = ' class="best"' if summary.loss == best else ""
    ratio = "" if summary.step_ratio is None else f"{summary.step_ratio:.2f}"
    seconds = summary.step_seconds
    per_step = "" if seconds is None else f"{1e3 * seconds:.0f} ms"
    rows.append(
      f"<tr><th scope=row>{page.scheme(summary.scheme)}</th>"
      f"<td{mark}>{summary.loss:.4f}<small>{losses}</small></td>"
      f"<td>{page.signed(summary.difference)}<small>{differences}</small></td>"
      f"<td>{ratio}<small>{per_step}</small></td>"
      f"<td>{summary.parameters:,}</td>"
      f"<td>{summary.step_bytes / 1e6:.0f} MB</td></tr>"
    )
  return "\n".join(rows)


def _coincide(summaries: Sequence[results.Summary]) -> str:
  """How far PreNorm and its twin are apart here, if both were trained."""
  twin = next((s for s in summaries if s.scheme == "rescaled"), None)
  if twin is None or not twin.differences:
    return ""
  apart = max(abs(difference) for difference in twin.differences)
  return f" Here their final validation losses differ by up to {apart:.4f}."


def _samples(inside: Mapping[str, Sequence[inspection.Look]]) -> str:
  parts = []
  for scheme, found in inside.items():
    look = found[0]
    parts.append(
      f"<figure><figcaption>{page.scheme(scheme)}</figcaption>"
      f"<pre><b>{html.escape(look.prompt)}</b>{html.escape(look.sample)}</pre>"
      "</figure>"
    )
  return "\n".join(parts)


def _facts(
  config: config_lib.RunConfig,
  runs: Sequence[results.Run],
  facts: Mapping[str, Any],
) -> str:
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
      f"{sum(run.seconds for run in runs):.0f} s of training, evaluation and"
      " compilation"
    ),
  }
  return page.facts(listed)
