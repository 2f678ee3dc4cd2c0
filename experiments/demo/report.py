# SPDX-License-Identifier: Apache-2.0
"""The demo's report: losses, then what the trained networks read and write."""

from collections.abc import Mapping, Sequence
import functools
import pathlib
from typing import Any, NamedTuple

from etils import epath
from matplotlib import figure as figure_lib
import numpy as np

from attnres_jax import analysis
from attnres_jax import data
from attnres_jax.analysis import figures
from attnres_jax.analysis import plots
from attnres_jax.inference import sample
from attnres_jax.scaling import grid
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import monitor
from attnres_jax.sweep import state as state_lib
from attnres_jax.train import metrics
from experiments.demo import config
from experiments.looks import run as looks
from experiments.pages import curves
from experiments.pages import page
from experiments.pages import svg
from experiments.pages import sweep
from experiments.pages import variants

_BODY = pathlib.Path(__file__).with_name("report_page.html")
_INSIDE = pathlib.Path(__file__).with_name("report_inside.html")
_PROMPT, _SAMPLE_TOKENS = "def ", 240
_BATCH = 16


class Look(NamedTuple):
  """The inside of one trained network.

  Attributes:
    depth_weights: of a scheme that attends over depth, else None.
    magnitudes: of one batch.
    text: continues the prompt; of a scheme's first seed, as are the weights.
  """

  depth_weights: analysis.DepthWeights | None
  magnitudes: analysis.Magnitudes
  text: str


def render(folder: epath.Path, progress: Sequence[monitor.Progress]) -> str:
  """The page; once all runs are done, with a look into their networks."""
  return sweep.report(
    folder,
    progress,
    "Attention Residuals, side by side",
    functools.partial(_answer, folder, progress),
  )


def _answer(
  folder: epath.Path,
  progress: Sequence[monitor.Progress],
  rows: Sequence[variants.Row],
) -> page.Html:
  inside = ""
  if all(one.status == state_lib.DONE for one in progress):
    looks_of: dict[str, list[Look]] = {}
    for one, run in _whole(progress):
      known = looks_of.setdefault(one.residual, [])
      known.append(look(folder, run, first=not known))
    inside = page.fill(
      _INSIDE.read_text(encoding="utf-8"),
      depth_figure=_depth(looks_of),
      magnitude_figure=_magnitudes(looks_of),
      samples=_samples(looks_of),
    )
  return page.fill(
    _BODY.read_text(encoding="utf-8"),
    validation=_validation(folder, progress),
    gain=variants.more_steps(config.STUDY, rows),
    table=variants.answer(config.STUDY, rows),
    inside=inside,
  )


def _whole(
  progress: Sequence[monitor.Progress],
) -> list[tuple[monitor.Progress, grid.Run]]:
  """Runs of full length."""
  return [
    (one, one.run)
    for one in progress
    if one.run is not None and "budget" not in one.run.overrides
  ]


def _validation(
  folder: epath.Path, progress: Sequence[monitor.Progress]
) -> page.Html:
  """Losses during the runs of full length, on a sample of the split."""
  whole = [one for one, _ in _whole(progress)]
  rows = {
    one.name: metrics.read_rows(
      folder / one.name, "validation", on_damage=lambda text: None
    )
    for one in whole
  }
  tokens = min((own[0]["tokens"] for own in rows.values() if own), default=0)

  def sampled(one: monitor.Progress) -> curves.Curve:
    # The last row, at the end, reads the whole split.
    own = [row for row in rows[one.name] if row["tokens"] == tokens]
    return [(row["step"], row["loss"]) for row in own]

  # All have one setting.
  panels = list(curves.of_sweep(whole, sampled).values())
  figure = curves.draw({"Validation": panels[0]}) if panels else None
  if figure is None:
    return page.Html("")
  text = (
    f"Losses on the same {tokens:,} tokens of the validation split during the"
    " runs. The table has losses at the end, on the whole split."
  )
  return page.fill(
    "<figure>{{ svg }}<figcaption>{{ text }}</figcaption></figure>\n",
    svg=svg.to_svg(figure, "validation"),
    text=text,
  )


def look(folder: epath.Path, run: grid.Run, first: bool) -> Look:
  """Loads the last checkpoint of a run and looks into its network.

  Only the first seed of a scheme attends for the page and writes.
  """
  network = looks.load("", 0, folder / run.name)
  model, tokens_BT = network.model, network.tokens_BT[:_BATCH]
  magnitudes = analysis.magnitudes(model, tokens_BT)
  if not first:
    return Look(None, magnitudes, "")
  weights = None
  if model.residual.source_labels() is not None:
    weights = analysis.depth_weights(model, tokens_BT[:, :-1])
  text = sample.sample_text(
    model,
    data.make_tokenizer(folder_lib.run_config(run).data),
    _PROMPT,
    num_tokens=_SAMPLE_TOKENS,
  )
  return Look(weights, magnitudes, text)


def _depth(looks_of: Mapping[str, Sequence[Look]]) -> page.Html:
  """Weights in the first network of each scheme, attention and MLP."""

  def draw(scheme: str, found: analysis.DepthWeights, kind: str) -> Any:
    figure = figure_lib.Figure(figsize=(4.6, 3.0), layout="constrained")
    axes = figure.subplots()
    plots.depth_bar(figure, plots.depth_panel(axes, scheme, found, kind), axes)
    return page.fill(
      "<div>{{ svg }}<p class=note>{{ text }}</p></div>\n",
      svg=svg.to_svg(figure, f"{scheme}{kind}"),
      text=what(found, kind),
    )

  return page.join(
    draw(scheme, found.depth_weights, kind)
    for scheme, (found, *_) in looks_of.items()
    if found.depth_weights is not None
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


def _magnitudes(looks_of: Mapping[str, Sequence[Look]]) -> page.Html:
  def draw(name: str) -> Any:
    figure = figure_lib.Figure(figsize=(4.6, 3.4), layout="constrained")
    axes = figure.subplots()
    measured = {
      scheme: [one.magnitudes for one in found]
      for scheme, found in looks_of.items()
    }
    plots.magnitude_panel(axes, measured, name)
    figures.legend(figure, axes, columns=2)
    return svg.to_svg(figure, name)

  return page.join(map(draw, ("state_rms", "grad_norm")))


def _samples(looks_of: Mapping[str, Sequence[Look]]) -> page.Html:
  return page.join(
    page.fill(
      "<figure><figcaption>{{ scheme }}</figcaption>"
      "<pre><b>{{ prompt }}</b>{{ sample }}</pre></figure>\n",
      scheme=page.label(figures.name_of(scheme)),
      prompt=_PROMPT,
      sample=found.text,
    )
    for scheme, (found, *_) in looks_of.items()
  )


_, PUBLISHED = variants.experiment(__file__, __doc__, config.STUDY)
