# SPDX-License-Identifier: Apache-2.0
"""The table and the figures of the README, from the rows."""

from collections.abc import Mapping, Sequence
import math
import statistics

from matplotlib import colors
from matplotlib import figure as figure_lib
import numpy as np

from attnres_jax.analysis import figures
from attnres_jax.scaling import pairs
from experiments.pages import page
from experiments.pages import readme

Row = Mapping[str, str]

# Whose style each student has.
_LOOKS = {
  "standard": ("standard", "prenorm"),
  "rescaled": ("rescaled", "rescaled"),
  "attention": ("attention", "full_attnres"),
  "static": ("static mixing", "denseformer"),
}
_ALL_BAD = 9.99  # Shown for losses beyond it.


class Losses:
  """Losses by readout, student, temperature, rate and seed; NaN: diverged."""

  def __init__(self, rows: Sequence[Row]):
    self._found = {
      (
        row["readout"], row["student"], float(row["temperature"]),
        float(row["rate"]), int(row["seed"]),
      ): float(row["test_loss"])
      for row in rows
    }  # fmt: skip
    axes = [list(dict.fromkeys(axis)) for axis in zip(*self._found)]
    self.readouts, self.students, self.temperatures, self.rates, _ = axes

  def of(
    self, readout: str, student: str, temperature: float, rate: float
  ) -> dict[int, float]:
    """By seed."""
    key = readout, student, temperature, rate
    return {k[4]: loss for k, loss in self._found.items() if k[:4] == key}

  def mean(self, *key) -> float:
    """Over seeds; NaN if a run diverged."""
    return statistics.fmean(self.of(*key).values())

  def best_rate(self, readout: str, student: str, temperature: float) -> float:
    """That of the smallest mean; runs that diverge do not count."""
    means = {
      rate: self.mean(readout, student, temperature, rate)
      for rate in self.rates
    }
    return min(means, key=lambda rate: _or_infinite(means[rate]))


def results(rows: Sequence[Row]) -> str:
  """For the README: the best rate of each student, and paired differences."""
  losses = Losses(rows)
  parts = [
    part
    for readout in losses.readouts
    for part in (f"Readout: {readout}.", _table(losses, readout))
  ]
  return "\n\n".join([*parts, _diverged(rows), _origin(rows)])


def _table(losses: Losses, readout: str) -> str:
  header = (
    "T", *(_LOOKS[student][0] for student in losses.students),
    "attention − rescaled", "standard − rescaled",
  )  # fmt: skip
  lines = []
  for temperature in losses.temperatures:
    best = {
      student: losses.of(
        readout, student, temperature,
        losses.best_rate(readout, student, temperature),
      )
      for student in losses.students
    }  # fmt: skip
    cells = [
      f"{statistics.fmean(found.values()):.4f}"
      f" ({min(found.values()):.4f} to {max(found.values()):.4f},"
      f" rate {losses.best_rate(readout, student, temperature):g})"
      for student, found in best.items()
    ]
    apart = [
      page.difference(pairs.difference(best[student], best["rescaled"]))
      for student in ("attention", "standard")
    ]
    lines.append([f"{temperature:g}", *cells, *apart])
  return readme.table(header, lines)


def _diverged(rows: Sequence[Row]) -> str:
  lost = [row for row in rows if not math.isfinite(float(row["test_loss"]))]
  return (
    f"{len(rows)} runs, of which {len(lost)} diverged. Losses are mean squared"
    " errors over the variance of the teacher's output, with the best rate of"
    " each student and temperature: mean over seeds, range, and differences of"
    f" pairs with {pairs.LEVEL:.0%} intervals."
  )


def _origin(rows: Sequence[Row]) -> str:
  hardware, python, jax, commit = (
    ", ".join(sorted({row[name] for row in rows}))
    for name in ("hardware", "python", "jax", "commit")
  )
  return f"{hardware}; Python {python}, jax {jax}, commit {commit}."


def curves(rows: Sequence[Row]) -> figure_lib.Figure:
  """Loss over rate, a panel for each readout and temperature."""
  losses = Losses(rows)
  shape = len(losses.readouts), len(losses.temperatures)
  drawn = figure_lib.Figure(
    figsize=(2.1 * shape[1], 2.3 * shape[0] + 0.4), layout="constrained"
  )
  grid = drawn.subplots(*shape, sharex=True, sharey="row", squeeze=False)
  for line, readout in zip(grid, losses.readouts):
    for axes, temperature in zip(line, losses.temperatures):
      for student in losses.students:
        label, scheme = _LOOKS[student]
        found = [
          list(losses.of(readout, student, temperature, rate).values())
          for rate in losses.rates
        ]
        middle = [statistics.fmean(values) for values in found]
        look = figures.style_of(scheme)
        axes.plot(losses.rates, middle, label=label, **look)
        low, high = [min(v) for v in found], [max(v) for v in found]
        axes.fill_between(
          losses.rates, low, high, color=look["color"], alpha=0.15, linewidth=0
        )
      axes.set(xscale="log", yscale="log")
      axes.set_title(f"T = {temperature:g}", fontsize=9)
      figures.style(axes)
    line[0].set_ylabel(f"loss, {readout} readout")
  for axes in grid[-1]:
    axes.set_xlabel("rate")
  figures.legend(drawn, grid[0, 0])
  return drawn


def heatmaps(rows: Sequence[Row]) -> figure_lib.Figure:
  """Mean loss by temperature and rate, and attention over rescaled."""
  losses = Losses(rows)
  columns = [*losses.students, "attention / rescaled"]
  shape = len(losses.readouts), len(columns)
  drawn = figure_lib.Figure(
    figsize=(2.3 * shape[1], 2.4 * shape[0]), layout="constrained"
  )
  grid = drawn.subplots(*shape, sharex=True, sharey=True, squeeze=False)
  for line, readout in zip(grid, losses.readouts):
    means = {
      student: np.array(
        [
          [losses.mean(readout, student, t, rate) for rate in losses.rates]
          for t in losses.temperatures
        ]
      )
      for student in losses.students
    }
    known = np.concatenate([m[np.isfinite(m)] for m in means.values()])
    norm = colors.LogNorm(known.min(), min(known.max(), 2.0))
    ratio = means["attention"] / means["rescaled"]
    for axes, name in zip(line, columns):
      if name in means:
        shown = means[name]
        axes.imshow(shown, norm=norm, cmap="viridis_r")
        axes.set_title(_LOOKS[name][0], fontsize=9)
      else:
        shown = ratio
        half = max(2.0, float(np.nanmax(np.abs(np.log10(ratio)))))
        axes.imshow(np.log10(ratio), cmap="PuOr", vmin=-half, vmax=half)
        axes.set_title(name, fontsize=9)
      for (i, j), value in np.ndenumerate(shown):
        colour = "white" if name in means and value > 0.1 else "black"
        axes.text(
          j, i, _short(value), ha="center", va="center", fontsize=6.5,
          color=colour,
        )  # fmt: skip
      axes.set_xticks(
        range(len(losses.rates)), [f"{r:g}" for r in losses.rates]
      )
      axes.set_yticks(
        range(len(losses.temperatures)), [f"{t:g}" for t in losses.temperatures]
      )
      axes.tick_params(labelsize=7, length=0)
    line[0].set_ylabel(f"T ({readout} readout)")
  for axes in grid[-1]:
    axes.set_xlabel("rate")
  return drawn


def _short(value: float) -> str:
  if not math.isfinite(value):
    return "–"
  return f"{value:.3f}" if value < _ALL_BAD else f"{value:.0e}"


def _or_infinite(value: float) -> float:
  return value if math.isfinite(value) else math.inf
