# SPDX-License-Identifier: Apache-2.0
"""The tables of the README, from the rows."""

from collections.abc import Mapping, Sequence
import math
import statistics

import numpy as np
import pandas as pd

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
  numbers = {"temperature": float, "rate": float, "seed": int}
  runs = pd.DataFrame(rows).astype(numbers | {"test_loss": float})
  # Seeds across; a mean with a run that diverged is none.
  setting = ["readout", "student", "temperature"]
  arms = runs.pivot_table(
    "test_loss", [*setting, "rate"], "seed", dropna=False, sort=False
  )
  means = arms.mean(axis=1, skipna=False)
  means = means[np.isfinite(means)]
  chosen = means.groupby(level=setting, sort=False).idxmin()
  return {key[:3]: (key[3], arms.loc[key].to_dict()) for key in chosen}


def results(rows: Sequence[Row]) -> str:
  """A table per readout: every student at its best rate, and differences."""
  chosen = best(rows)
  students = list(dict.fromkeys(student for _, student, _ in chosen))
  parts = []
  for readout in dict.fromkeys(readout for readout, _, _ in chosen):
    lines = []
    for temperature in dict.fromkeys(
      temperature for _, _, temperature in chosen
    ):
      arms = {name: chosen[readout, name, temperature] for name in students}
      cells = [
        page.interval(
          statistics.fmean(seeds.values()), min(seeds.values()),
          max(seeds.values()), 4, f"({{}} to {{}}, rate {rate:g})",
        )
        for rate, seeds in arms.values()
      ]  # fmt: skip
      apart = [
        page.difference(pairs.difference(arms[name][1], arms["rescaled"][1]))
        for name in ("attention", "standard")
      ]
      lines.append([f"{temperature:g}", *cells, *apart])
    names = [name.replace("static", "static mixing") for name in students]
    header = "T", *names, "attention − rescaled", "standard − rescaled"
    parts += [f"Readout: {readout}.", page.Table(header, lines)]
  lost = sum(not math.isfinite(float(row["test_loss"])) for row in rows)
  parts.append(
    f"{len(rows)} runs, of which {lost} diverged. Losses are mean squared"
    " errors over the variance of the teacher's output, with the best rate of"
    " each student and temperature: mean over seeds, range, and differences of"
    f" pairs with {pairs.LEVEL:.0%} intervals."
  )
  return readme.text(*parts, readme.origin(rows))


PUBLISHED = readme.Published(__file__, [readme.Part(results)])
