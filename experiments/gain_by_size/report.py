# SPDX-License-Identifier: Apache-2.0
"""Gain and cost by size: losses, differences, and what they are worth."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import figure as figure_lib
from matplotlib import ticker

from attnres_jax.analysis import figures
from attnres_jax.scaling import fit as fit_lib
from attnres_jax.scaling import pairs
from attnres_jax.scaling import speedup
from attnres_jax.sweep.pages import losses as losses_lib
from attnres_jax.sweep.pages import page
from experiments.gain_by_size import config
from experiments.pages import readme

Row = Mapping[str, Any]

BASELINE = "prenorm"
# Of a law.
LEAST_SIZES = 3
# What a scheme pays with: column of a row, its unit, and words.
PRICES = {
  "compute_attention": ("PFLOP/s-days", "FLOPs"),
  "training_seconds": ("seconds", "seconds"),
}


def rates(rows: Sequence[Row]) -> str:
  """A table of losses at the pilot's size; each scheme's lowest is bold."""
  frame = losses_lib.frame(rows).astype({"peak_lr": float})
  means = frame.pivot_table("loss", "residual", "peak_lr", sort=False)
  means = means[sorted(means)]
  lines = [
    [figures.name_of(scheme), *losses_lib.bold(row, row.idxmin())]
    for scheme, row in means.iterrows()
  ]
  header = ["residual", *(f"{rate:g}" for rate in means)]
  table = page.Table(header, lines)
  return readme.text(table, readme.origin(rows))


def by_size(rows: Sequence[Row]) -> dict[str, list[Row]]:
  """Rows of each size that has been run, in the order of the config."""
  sizes = {
    size: [r for r in rows if r["size"] == size] for size in config.SIZES
  }
  return {size: of_size for size, of_size in sizes.items() if of_size}


def results(rows: Sequence[Row]) -> str:
  """A table: a row per size and scheme, with empty cells where nobody ran."""
  sizes, lines = by_size(rows), []
  for size in config.SIZES:
    of_size = sizes.get(size, [])
    losses = pairs.losses(of_size, "residual") if of_size else {}
    spread = pairs.pooled(losses, BASELINE) if BASELINE in losses else None
    for scheme in config.SCHEMES:
      cells = _cells(of_size, losses, scheme, spread)
      lines.append([size, figures.name_of(scheme), *cells])
  header = [
    "parameters", "residual", "tokens", "rate", "validation loss",
    "minus PreNorm", "training time over PreNorm's",
  ]  # fmt: skip
  return readme.text(page.Table(header, lines), readme.origin(rows, runs=True))


def _cells(
  of_size: Sequence[Row],
  losses: pairs.Losses,
  scheme: str,
  spread: pairs.Spread | None,
) -> list[Any]:
  rows = [row for row in of_size if row["residual"] == scheme]
  if not rows:
    return [""] * 5
  mean = sum(losses[scheme].values()) / len(rows)
  cells = [
    f"{int(rows[0]['tokens']) / 1e6:.1f}M", f"{float(rows[0]['peak_lr']):.3g}",
    f"{mean:.4f}",
  ]  # fmt: skip
  if scheme == BASELINE or BASELINE not in losses:
    return [*cells, "", ""]
  apart = pairs.difference(losses[scheme], losses[BASELINE], spread)
  baseline = [row for row in of_size if row["residual"] == BASELINE]
  ratio = _mean(rows, "training_seconds") / _mean(baseline, "training_seconds")
  return [*cells, page.difference(apart), f"{ratio:.2f}"]


def _mean(rows: Sequence[Row], column: str) -> float:
  return sum(float(row[column]) for row in rows) / len(rows)


def runs_of(rows: Sequence[Row], scheme: str, price: str) -> fit_lib.Runs:
  """Losses of a scheme against what it paid.

  Seconds are means of a size: seeds share a program, and the scatter of their
  clocks is the machine's.
  """
  chosen = [row for row in rows if row["residual"] == scheme]
  paid = {
    size: _mean([r for r in chosen if r["size"] == size], price)
    for size in {row["size"] for row in chosen}
  }
  return fit_lib.Runs(
    compute=[paid[row["size"]] for row in chosen],
    loss=[fit_lib.loss_of(row) for row in chosen],
    size=tuple(row["size"] for row in chosen),
    seed=tuple(int(row["seed"]) for row in chosen),
  )


def worth(
  rows: Sequence[Row], scheme: str, price: str
) -> fit_lib.Estimate | None:
  """How many times what a scheme paid PreNorm pays for the same loss.

  None unless both have three sizes, for seconds on one kind of device.

  Raises:
    ConfigError: a run diverged, or PreNorm does not improve with size.
  """
  if len({row["device"] for row in rows}) > 1 and "seconds" in price:
    return None
  baseline, other = (runs_of(rows, name, price) for name in (BASELINE, scheme))
  if len({*baseline.size} & {*other.size}) < LEAST_SIZES:
    return None
  return speedup.effective_speedup(baseline, other)


def answer(rows: Sequence[Row]) -> str:
  """What a scheme is worth in FLOPs, and in seconds of the device that ran."""
  sizes = list(by_size(rows))
  missing = [size for size in config.SIZES if size not in sizes]
  sentences = []
  for scheme in config.SCHEMES:
    for price, (_, word) in PRICES.items():
      if scheme != BASELINE and (times := worth(rows, scheme, price)):
        sentences.append(
          f"{figures.name_of(scheme)} reaches with a given number of {word}"
          f" what PreNorm reaches with {times.value:.2f}"
          f" [{times.low:.2f}, {times.high:.2f}] times as many: at equal"
          f" {word} it is {_verdict(times)}."
        )
  if not sentences:
    sentences.append("Three sizes make a law; fewer have been run.")
  if missing:
    sentences.append(f"Nobody has run {', '.join(missing)} yet.")
  return " ".join(sentences)


def _verdict(times: fit_lib.Estimate) -> str:
  if times.low is not None and times.low > 1:
    return "ahead"
  is_behind = times.high is not None and times.high < 1
  return "behind" if is_behind else "not told apart"


def figure(rows: Sequence[Row]) -> figure_lib.Figure:
  """Loss against FLOPs, and against seconds of each device."""
  drawn = figure_lib.Figure(figsize=(8.6, 3.6), layout="constrained")
  panels = drawn.subplots(1, len(PRICES), sharey=True)
  for axes, (price, (unit, _)) in zip(panels, PRICES.items()):
    for device in dict.fromkeys(row["device"] for row in rows):
      of_device = [row for row in rows if row["device"] == device]
      for scheme in config.SCHEMES:
        runs = runs_of(of_device, scheme, price)
        sizes = dict.fromkeys(runs.size)
        at = [[s == size for s in runs.size] for size in sizes]
        axes.plot(
          [runs.compute[a].mean() for a in at],
          [runs.loss[a].mean() for a in at],
          marker="o", markersize=3, label=figures.name_of(scheme),
          **figures.style_of(scheme),
        )  # fmt: skip
    figures.logarithmic(axes)
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.set_xlabel(
      f"{unit} of {', '.join(dict.fromkeys(r['device'] for r in rows))}"
      if "seconds" in price
      else unit
    )
    figures.style(axes)
  panels[0].set_ylabel("validation loss, nats per byte")
  figures.legend(drawn, panels[0])
  return drawn
