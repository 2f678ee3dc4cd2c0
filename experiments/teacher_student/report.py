# SPDX-License-Identifier: Apache-2.0
"""The tables of the README, from the rows."""

from collections.abc import Mapping, Sequence
import math
import statistics

from attnres_jax.scaling import pairs
from attnres_jax.sweep.pages import page
from experiments.pages import readme

Row = Mapping[str, str]
# Readout, student, temperature.
Key = tuple[str, str, float]


def best(rows: Sequence[Row]) -> dict[Key, tuple[float, dict[int, float]]]:
  """Each setting's rate of the smallest mean, and the losses there by seed.

  Rates at which a run diverges do not count.
  """
  losses: dict[Key, dict[float, dict[int, float]]] = {}
  for row in rows:
    key = row["readout"], row["student"], float(row["temperature"])
    arm = losses.setdefault(key, {}).setdefault(float(row["rate"]), {})
    arm[int(row["seed"])] = float(row["test_loss"])
  chosen = {}
  for key, by_rate in losses.items():
    mean = {
      rate: statistics.fmean(arm.values()) for rate, arm in by_rate.items()
    }
    rate = min(
      mean, key=lambda r: mean[r] if math.isfinite(mean[r]) else math.inf
    )
    chosen[key] = rate, by_rate[rate]
  return chosen


def results(rows: Sequence[Row]) -> str:
  """A table per readout: every student at its best rate, and differences."""
  chosen = best(rows)
  readouts, students, temperatures = (
    list(dict.fromkeys(axis)) for axis in zip(*chosen)
  )
  parts = []
  for readout in readouts:
    lines = []
    for temperature in temperatures:
      arms = {name: chosen[readout, name, temperature] for name in students}
      cells = [
        f"{statistics.fmean(seeds.values()):.4f} ({min(seeds.values()):.4f} to"
        f" {max(seeds.values()):.4f}, rate {rate:g})"
        for rate, seeds in arms.values()
      ]
      apart = [
        page.difference(pairs.difference(arms[name][1], arms["rescaled"][1]))
        for name in ("attention", "standard")
      ]
      lines.append([f"{temperature:g}", *cells, *apart])
    names = [name.replace("static", "static mixing") for name in students]
    header = "T", *names, "attention − rescaled", "standard − rescaled"
    parts += [f"Readout: {readout}.", readme.table(header, lines)]
  lost = sum(not math.isfinite(float(row["test_loss"])) for row in rows)
  parts.append(
    f"{len(rows)} runs, of which {lost} diverged. Losses are mean squared"
    " errors over the variance of the teacher's output, with the best rate of"
    " each student and temperature: mean over seeds, range, and differences of"
    f" pairs with {pairs.LEVEL:.0%} intervals."
  )
  return "\n\n".join([*parts, readme.origin(rows)])
