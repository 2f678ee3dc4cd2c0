# SPDX-License-Identifier: Apache-2.0
"""The demo's report: losses, then what the trained networks read."""

from collections.abc import Mapping, Sequence
import functools
import pathlib
from typing import Any, NamedTuple

from etils import epath
import jax
from matplotlib import figure as figure_lib
import pandas as pd

from attnres_jax import analysis
from attnres_jax import config as config_lib
from attnres_jax.analysis import figures
from attnres_jax.analysis import plots
from attnres_jax.common import sharding
from attnres_jax.scaling import grid
from attnres_jax.sweep import monitor
from attnres_jax.sweep import state as state_lib
from attnres_jax.sweep.pages import page
from attnres_jax.sweep.pages import svg
from attnres_jax.sweep.pages import sweep_page
from experiments.demo import config
from experiments.looks import run as looks
from experiments.pages import readme
from experiments.pages import variants

_BODY = pathlib.Path(__file__).with_name("report_page.html")
_INSIDE = pathlib.Path(__file__).with_name("report_inside.html")
_BATCH = 16


class Look(NamedTuple):
  """The inside of one trained network.

  It has depth weights only if its scheme attends over depth. Magnitudes are of
  one batch.
  """

  depth_weights: analysis.DepthWeights | None
  magnitudes: analysis.Magnitudes


def render(folder: epath.Path, progress: Sequence[monitor.Progress]) -> str:
  """The page; once all runs are done, with a look into their networks."""
  return sweep_page.render(
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
  inside, compared = "", variants.compare(config.STUDY, rows)
  if all(arm.status == state_lib.DONE for arm in progress):
    looks_of: dict[str, Look] = {}
    for arm in progress:
      # Rescaled is PreNorm's function, and a look compiles for ten seconds.
      done = arm.residual in looks_of or arm.residual == "rescaled"
      if arm.run is not None and not done:
        looks_of[arm.residual] = look(folder, arm.run)
    inside = page.fill(
      _INSIDE.read_text(encoding="utf-8"),
      depth_figure=_depth(looks_of),
      magnitude_figure=_magnitudes(looks_of),
    )
  return page.fill(
    _BODY.read_text(encoding="utf-8"),
    lead=page.bold(lead(rows)),
    table=variants.table(compared).html() if rows else "",
    inside=inside,
  )


def lead(rows: Sequence[variants.Row]) -> str:
  """What the losses say, in a sentence per scheme that attends over depth."""
  sentences = []
  apart = variants.compare(config.STUDY, rows).apart
  for name, difference in apart.items():
    variant = config.STUDY.variants[name]
    if variant.residual == "rescaled" or difference.margin is None:
      continue
    below, more = -difference.mean, difference.margin
    if below > more:
      text = f"ends **{below:.3f} ± {more:.3f}** nats per token below PreNorm"
    elif below < -more:
      text = f"ends **{-below:.3f} ± {more:.3f}** nats per token above PreNorm"
    else:
      text = f"cannot be told from PreNorm ({page.difference(difference)})"
    sentences.append(f"{variant.label} {text}.")
  return " ".join(sentences) or "No scheme is finished yet."


def results(rows: Sequence[variants.Row]) -> str:
  """For the README: what the losses say, then the losses."""
  return readme.text(lead(rows), variants.results(config.STUDY, rows))


def look(folder: epath.Path, run: grid.Run) -> Look:
  """Loads the last checkpoint of a run and looks into its network."""
  network = looks.load("", 0, folder / run.name)
  model, tokens_BT = network.model, network.tokens_BT[:_BATCH]
  weights = None
  # Under a mesh of known devices, no kernels of other platforms are traced.
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1), jax.devices()[:1])
  with jax.set_mesh(mesh):
    if model.residual.source_labels() is not None:
      weights = analysis.depth_weights(model, tokens_BT[:, :-1])
    return Look(weights, analysis.magnitudes(model, tokens_BT))


def _depth(looks_of: Mapping[str, Look]) -> page.Html:
  """Weights in the first network of each scheme, attention and MLP."""

  def draw(scheme: str, reads: analysis.DepthWeights, kind: str) -> Any:
    figure = figure_lib.Figure(figsize=(4.6, 3.0), layout="constrained")
    axes = figure.subplots()
    plots.depth_bar(figure, plots.depth_panel(axes, scheme, reads, kind), axes)
    return page.fill(
      "<div>{{ svg }}<p class=note>{{ text }}</p></div>\n",
      svg=svg.to_svg(figure, f"{scheme}{kind}"),
      text=what(reads, kind),
    )

  return page.Html("").join(
    draw(scheme, seen.depth_weights, kind)
    for scheme, seen in looks_of.items()
    if seen.depth_weights is not None
    for kind in plots.KINDS
  )


def what(reads: analysis.DepthWeights, kind: str) -> str:
  """The largest preference and the largest neglect of a panel, in words."""
  multiples = plots.multiples(getattr(reads, kind))
  table = pd.DataFrame(multiples, columns=list(reads.columns))
  times: Any = table[table.count(axis=1) > 1].unstack().dropna()
  if times.empty:
    return "Every read has one source only."
  (source, block), (neglected, low) = times.idxmax(), times.idxmin()
  name = {"attention": "attention", "mlp": "the MLP"}[kind]
  return (
    f"The largest weight is {times.max():.1f} times uniform: {name} of"
    f" transformer block {block + 1} reads {source}. The smallest is"
    f" {times.min():.1f} times uniform: {neglected} in block {low + 1}."
  )


def _magnitudes(looks_of: Mapping[str, Look]) -> page.Html:
  def draw(name: str) -> Any:
    figure = figure_lib.Figure(figsize=(4.6, 3.4), layout="constrained")
    axes = figure.subplots()
    measured = {scheme: [seen.magnitudes] for scheme, seen in looks_of.items()}
    plots.magnitude_panel(axes, measured, name)
    figures.legend(figure, axes, columns=2)
    return svg.to_svg(figure, name)

  return page.Html("").join(map(draw, ("state_rms", "grad_norm")))


PUBLISHED = readme.Published(
  __file__,
  [
    readme.Part(results),
    readme.Part(
      functools.partial(variants.forest, config.STUDY),
      document="differences.svg",
    ),
  ],
  render,
)
