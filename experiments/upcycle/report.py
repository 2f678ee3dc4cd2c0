# SPDX-License-Identifier: Apache-2.0
"""What upcycling changed, from the rows of run.py."""

from collections.abc import Mapping, Sequence
import statistics
from typing import Any

from attnres_jax.scaling import pairs
from attnres_jax.sweep.pages import page
from experiments.pages import readme

BASELINE = "prenorm"
LABELS = {
  BASELINE: "PreNorm, trained on",
  "replacement": "Block, scaled reads",
  "delta": "delta",
  "delta_faster": "delta, new parameters at ten times the rate",
}
Row = Mapping[str, Any]


def results(rows: Sequence[Row]) -> str:
  """For the README: losses of all arms, and their differences in pairs."""
  losses = pairs.losses(rows, "arm")
  apart = pairs.differences(losses, BASELINE)
  starts = {int(row["seed"]): float(row["source_loss"]) for row in rows}
  of_arm = {"PreNorm, as it was": (starts, "")}
  for arm, label in LABELS.items():
    text = page.difference(apart[arm]) if arm in apart else ""
    of_arm[label] = losses.get(arm, {}), text
  lines = [
    [label, str(len(seeds)), f"{statistics.fmean(seeds.values()):.4f}", text]
    for label, (seeds, text) in of_arm.items()
    if seeds
  ]
  header = "network", "pairs", "loss", "minus PreNorm, trained on"
  minutes = statistics.fmean(float(row["seconds"]) for row in rows) / 60
  first = rows[0]
  return readme.text(
    page.Table(header, lines),
    f"{first['source_steps']} steps, then {first['steps']} more"
    f" ({minutes:.1f} minutes each). \N{PLUS-MINUS SIGN} is a"
    f" {pairs.LEVEL:.0%} t interval. {readme.origin(rows)}",
  )


PUBLISHED = readme.Published(__file__, [readme.Part(results)])
