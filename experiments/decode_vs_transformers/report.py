# SPDX-License-Identifier: Apache-2.0
"""The table of the README, from rows of processes."""

from collections.abc import Mapping, Sequence
import statistics
from typing import Any

from experiments.pages import page

Row = Mapping[str, Any]


def table(rows: Sequence[Row]) -> str:
  """Tokens per second of both libraries, and their ratio."""
  header = (
    "network", "batch", "transformers, tokens/s", "ours, tokens/s", "ratio",
    "least step, ms", "ours", "ratio", "first token, ms", "ours",
  )  # fmt: skip
  lines = []
  keys = dict.fromkeys((row["network"], row["batch"]) for row in rows)
  for network, batch in keys:
    theirs, ours = (
      [
        row
        for row in rows
        if (row["network"], row["batch"], row["library"])
        == (network, batch, library)
      ]
      for library in ("transformers", "ours")
    )
    speed = [_median(one, "tokens_per_second") for one in (theirs, ours)]
    least = [
      min(float(row["least_step_ms"]) for row in one) for one in (theirs, ours)
    ]
    first = [_median(one, "first_token_ms") for one in (theirs, ours)]
    lines.append(
      [
        network, batch, _range(theirs), _range(ours),
        f"{speed[1] / speed[0]:.2f}",
        *(f"{x:.2f}" for x in least), f"{least[0] / least[1]:.2f}",
        *(f"{x:.0f}" for x in first),
      ]
    )  # fmt: skip
  one = rows[0]
  origin = (
    f"Medians over {len({row['round'] for row in rows})} processes of each"
    " library (slowest and fastest run); a ratio above 1 means that ours is"
    f" faster. {one['threads']} thread{'s' * (int(one['threads']) > 1)};"
    f" {one['hardware']}; Python {one['python']}, jax {one['jax']}, commit"
    f" {one['commit']}."
  )
  return f"{page.Table(header, lines).markdown()}\n\n{origin}"


def _median(rows: Sequence[Row], name: str) -> float:
  return statistics.median(float(row[name]) for row in rows)


def _range(rows: Sequence[Row]) -> str:
  low = min(float(row["slowest"]) for row in rows)
  high = max(float(row["fastest"]) for row in rows)
  return f"{_median(rows, 'tokens_per_second'):.1f} ({low:.1f}–{high:.1f})"
