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
  arms = {"PreNorm, as it was": starts}
  arms |= {LABELS[arm]: losses[arm] for arm in LABELS if arm in losses}
  gaps = {LABELS[arm]: page.difference(gap) for arm, gap in apart.items()}
  columns = {
    "network": lambda label: label,
    "pairs": lambda label: len(arms[label]),
    "loss": lambda label: f"{statistics.fmean(arms[label].values()):.4f}",
    "minus PreNorm, trained on": lambda label: gaps.get(label, ""),
  }
  minutes = statistics.fmean(float(row["seconds"]) for row in rows) / 60
  first = rows[0]
  return readme.text(
    page.Table.of(arms, columns),
    f"{first['source_steps']} steps, then {first['steps']} more"
    f" ({minutes:.1f} minutes each). \N{PLUS-MINUS SIGN} is a"
    f" {pairs.LEVEL:.0%} t interval. {readme.origin(rows)}",
  )


PUBLISHED = readme.Published(__file__, [readme.Part(results)])
