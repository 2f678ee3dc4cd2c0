# SPDX-License-Identifier: Apache-2.0
"""What upcycling changed, from the rows of run.py."""

from collections.abc import Mapping, Sequence
import statistics
from typing import Any

from matplotlib import figure as figure_lib
import numpy as np

from attnres_jax.analysis import figures
from attnres_jax.scaling import pairs
from experiments.pages import page

BASELINE = "prenorm"
LABELS = {
  BASELINE: "PreNorm, trained on",
  "replacement": "Block, scaled reads",
  "delta": "delta",
  "delta_faster": "delta, new parameters at ten times the rate",
}
# Whose style each arm has.
_LOOKS = {"replacement": "block_attnres", "delta": "delta_mh"}

Row = Mapping[str, Any]


def results(rows: Sequence[Row]) -> str:
  """For the README: losses of all arms, and their differences in pairs."""
  losses = pairs.losses(rows, "arm")
  apart = _differences(rows)
  starts = {int(row["seed"]): float(row["source_loss"]) for row in rows}
  lines = [_line("PreNorm, as it was", starts, "")]
  for arm, label in LABELS.items():
    if arm in losses:
      text = page.difference(apart[arm]) if arm in apart else ""
      lines.append(_line(label, losses[arm], text))
  header = "network", "pairs", "loss", "minus PreNorm, trained on"
  minutes = statistics.fmean(float(row["seconds"]) for row in rows) / 60
  first = rows[0]
  return (
    f"{page.Table(header, lines).markdown()}\n\n"
    f"{first['source_steps']} steps, then {first['steps']} more"
    f" ({minutes:.1f} minutes each). {first['hardware']}, other jobs running;"
    f" Python {first['python']}, jax {first['jax']}, commit {first['commit']}."
    f" \N{PLUS-MINUS SIGN} is a {pairs.LEVEL:.0%} t interval; arms scatter"
    " too differently to share a standard deviation."
  )


def figure(rows: Sequence[Row]) -> figure_lib.Figure:
  """Every difference from PreNorm that was trained on, and their mean."""
  apart = _differences(rows)
  shape = figure_lib.Figure(figsize=(7.4, 2.4), layout="constrained")
  axes = shape.subplots()
  arms = [arm for arm in LABELS if arm in apart]
  for height, arm in enumerate(arms):
    found, look = apart[arm], figures.look_of(_LOOKS.get(arm, "delta_mh"))
    values = list(found.by_seed.values())
    axes.plot(
      values, np.full(len(values), height), look.marker, color=look.colour,
      alpha=0.6, markersize=6,
    )  # fmt: skip
    if found.margin is not None:
      axes.errorbar(
        found.mean, height, xerr=found.margin, fmt="|", color=look.colour,
        markersize=18, capsize=5,
      )  # fmt: skip
  axes.axvline(0.0, color="grey", linewidth=0.8)
  axes.set_yticks(range(len(arms)), [LABELS[arm] for arm in arms])
  axes.set_ylim(max(1, len(arms)) - 0.5, -0.5)
  axes.set_xlabel("difference from PreNorm trained on, nats per byte")
  figures.style(axes)
  return shape


def _differences(rows: Sequence[Row]) -> dict[str, pairs.Difference]:
  """By arm. Their spreads differ too much to estimate one for all."""
  losses = pairs.losses(rows, "arm")
  base = losses.get(BASELINE, {})
  found = {
    arm: pairs.difference(own, base)
    for arm, own in losses.items()
    if arm != BASELINE
  }
  return {arm: one for arm, one in found.items() if one.by_seed}


def _line(
  label: str, losses: Mapping[int, float], difference: str
) -> list[str]:
  mean = f"{statistics.fmean(losses.values()):.4f}"
  return [label, str(len(losses)), mean, difference]
