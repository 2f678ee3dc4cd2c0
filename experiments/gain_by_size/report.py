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
# Beyond this, an end of a speed-up is not known.
LARGEST = 100
# What a scheme pays with: column of `frame`, its unit, and words.
PRICES = {
  "compute_attention": ("PFLOP/s-days", "FLOPs"),
  "quiet_seconds": ("seconds", "seconds"),
}


def frame(rows: Sequence[Row]) -> losses_lib.Frame:
  """Runs with numbers, in the order of sizes of the config.

  `quiet_seconds` are what all steps take if other programs leave the machine
  alone: each as long as the quickest tenth.
  """
  runs = losses_lib.frame(rows)
  runs = runs[runs["size"].isin(list(config.SIZES))]
  runs = runs.astype({"tokens": int, "peak_lr": float, "seed": int}).astype(
    {"compute_attention": float, "quick_step_seconds": float}
  )
  batch = runs["size"].map({k: size.batch for k, size in config.SIZES.items()})
  steps = runs["tokens"] / (batch * config.LENGTH)
  return runs.assign(quiet_seconds=steps * runs["quick_step_seconds"])


def rates(rows: Sequence[Row]) -> str:
  """A table of losses at the pilot's size; each scheme's lowest is bold."""
  table = losses_lib.lowest_marked(rows, "residual", "peak_lr", figures.name_of)
  return readme.text(table, readme.origin(rows))


def results(rows: Sequence[Row]) -> str:
  """A table: a row per size and scheme, with empty cells where nobody ran."""
  runs, lines = frame(rows), []
  for size in config.SIZES:
    of_size = runs[runs["size"] == size]
    losses = pairs.losses(of_size.to_dict("records"), "residual")
    apart = pairs.differences(losses, BASELINE)
    means = of_size.groupby("residual").mean(numeric_only=True)
    for scheme in config.SCHEMES:
      cells = [""] * 5
      if scheme in means.index:
        mean = means.loc[scheme]
        cells[:3] = (
          f"{mean['tokens'] / 1e6:.1f}M", f"{mean['peak_lr']:.3g}",
          f"{mean['loss']:.4f}",
        )  # fmt: skip
      if scheme in apart:
        seconds = means["quiet_seconds"]
        ratio = seconds[scheme] / seconds[BASELINE]
        cells[3:] = page.difference(apart[scheme]), f"{ratio:.2f}"
      lines.append([size, figures.name_of(scheme), *cells])
  header = [
    "parameters", "residual", "tokens", "rate", "validation loss",
    "minus PreNorm", "time over PreNorm's",
  ]  # fmt: skip
  return readme.text(page.Table(header, lines), readme.origin(rows, runs=True))


def runs_of(runs: losses_lib.Frame, scheme: str, price: str) -> fit_lib.Runs:
  """Losses of a scheme against what it paid.

  Seconds are means of a size: seeds share a program, and the scatter of their
  clocks is the machine's.
  """
  arm = runs[runs["residual"] == scheme]
  paid = arm.groupby("size")[price].transform("mean")
  return fit_lib.Runs(
    paid, arm["loss"], size=tuple(arm["size"]), seed=tuple(arm["seed"])
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
  runs = frame(rows)
  baseline, other = (runs_of(runs, name, price) for name in (BASELINE, scheme))
  if len({*baseline.size} & {*other.size}) < LEAST_SIZES:
    return None
  return speedup.effective_speedup(baseline, other)


def answer(rows: Sequence[Row]) -> str:
  """What a scheme is worth in FLOPs, and in seconds of the device that ran."""
  sizes = {row["size"] for row in rows}
  missing = [size for size in config.SIZES if size not in sizes]
  sentences = []
  for scheme in config.SCHEMES:
    for price, (_, word) in PRICES.items():
      if scheme != BASELINE and (times := worth(rows, scheme, price)):
        sentences.append(
          f"{figures.name_of(scheme)} reaches with a given number of {word}"
          f" what PreNorm reaches with {times.value:.2f} {interval(times)}"
          f" times as many: at equal {word} it is {_verdict(times)}."
        )
  if not sentences:
    sentences.append("Three sizes make a law; fewer have been run.")
  if missing:
    sentences.append(f"Nobody has run {', '.join(missing)} yet.")
  return " ".join(sentences)


def interval(times: fit_lib.Estimate) -> str:
  """Three sizes may leave an end open."""
  ends = [
    f"{end:.2f}" if end is not None and end < LARGEST else "?"
    for end in (times.low, times.high)
  ]
  return f"[{', '.join(ends)}]"


def _verdict(times: fit_lib.Estimate) -> str:
  if times.low is not None and times.low > 1:
    return "ahead"
  is_behind = times.high is not None and times.high < 1
  return "behind" if is_behind else "not told apart"


def figure(rows: Sequence[Row]) -> figure_lib.Figure:
  """Loss against FLOPs, and against seconds of each device."""
  runs = frame(rows)
  arms = runs.groupby(["device", "residual", "size"], sort=False)
  means = arms[[*PRICES, "loss"]].mean()
  drawn = figure_lib.Figure(figsize=(8.6, 3.6), layout="constrained")
  panels = drawn.subplots(1, len(PRICES), sharey=True)
  for axes, (price, (unit, _)) in zip(panels, PRICES.items()):
    for (_, scheme), arm in means.groupby(["device", "residual"], sort=False):
      axes.plot(
        arm[price], arm["loss"], marker="o", markersize=3,
        label=figures.name_of(scheme), **figures.style_of(scheme),
      )  # fmt: skip
    figures.logarithmic(axes)
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    devices = f" of {', '.join(runs['device'].unique())}"
    axes.set_xlabel(unit + devices * ("seconds" in price))
    figures.style(axes)
  panels[0].set_ylabel("validation loss, nats per byte")
  figures.legend(drawn, panels[0])
  return drawn


PUBLISHED = readme.Published(
  __file__,
  [
    readme.Part(rates, "rates", "rates"),
    readme.Part(results),
    readme.Part(answer, "answer"),
    readme.Part(figure, document="gain.svg"),
  ],
)
