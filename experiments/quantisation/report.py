# SPDX-License-Identifier: Apache-2.0
"""What rounding costs each scheme, from the rows of losses.py."""

from collections.abc import Mapping, Sequence
import statistics
from typing import Any

from attnres_jax.scaling import pairs
from experiments.pages import page
from experiments.pages import sweep
from experiments.quantisation import config

LABELS = {
  "prenorm": "PreNorm",
  "block": "Block",
  "full": "Full",
  "block_null": "Block, null source",
}
# (dtype, bits, cache) -> its name; in the order of the tables.
FORMS = {
  ("bfloat16", "0", "model"): "bfloat16, all of it",
  ("float32", "8", "model"): "weights int8",
  ("float32", "0", "int8"): "cache int8",
  ("float32", "8", "int8"): "both int8",
  ("float32", "4", "model"): "weights 4 bits",
}
# In thousandths of a nat.
_UNIT = 1e3

Row = Mapping[str, Any]
Form = tuple[str, str, str]


def networks(rows: Sequence[Row]) -> str:
  """For the README: the losses of the sweep, of the last weights."""
  losses = {
    (row["variant"], int(row["seed"])): float(row["last_weights_loss"])
    for row in rows
  }
  lines = []
  for variant in config.VARIANTS:
    seeds = [seed for name, seed in losses if name == variant]
    own = [losses[variant, seed] for seed in seeds]
    apart = [
      losses[variant, seed] - losses[config.BASELINE, seed] for seed in seeds
    ]
    line = [LABELS[variant], str(len(own)), f"{statistics.mean(own):.4f}"]
    lines.append([*line, ", ".join(map(page.signed, apart))])
  header = "", "runs", "loss", "minus PreNorm, by seed"
  return f"{page.Table(header, lines).markdown()}\n\n{sweep.origin(rows)}"


def costs(rows: Sequence[Row], form: Form) -> dict[str, dict[int, float]]:
  """Loss in this form minus that in float32, by variant and seed."""
  found: dict[str, dict[int, float]] = {}
  for row in rows:
    if (row["dtype"], row["bits"], row["cache"]) == form:
      own = found.setdefault(row["variant"], {})
      own[int(row["seed"])] = float(row["cost"])
  return found


def table(rows: Sequence[Row]) -> str:
  """For the README: costs, and their differences from PreNorm.

  Of the seeds that all variants have.
  """
  known = {(row["variant"], row["seed"]) for row in rows}
  whole = lambda seed: all((v, seed) in known for v in config.VARIANTS)
  rows = [row for row in rows if whole(row["seed"])]
  lines, apart = [], []
  for form, name in FORMS.items():
    found = costs(rows, form)
    lines.append([name, *(_range(found[v]) for v in config.VARIANTS)])
    others = pairs.differences(found, config.BASELINE)
    apart.append([name, *(_interval(others[v]) for v in others)])
  header = ["", *(LABELS[variant] for variant in config.VARIANTS)]
  first = rows[0]
  errors = [float(row["error"]) for row in rows if row["bits"] == "8"]
  seeds = sorted({int(row["seed"]) for row in rows})
  text = [
    page.Table(header, lines).markdown(),
    "The same, minus that of PreNorm with the same seed:",
    page.Table(["", *header[2:]], apart).markdown(),
    "In thousandths of a nat per byte. Above, means over seeds"
    f" {', '.join(map(str, seeds))}, with the least and the largest; below,"
    f" means with their {pairs.LEVEL:.0%} intervals. The choice of the text"
    f" adds an error of {_UNIT * statistics.mean(errors):.2f} to every cost of"
    f" int8 weights. {first['hardware']}; Python {first['python']}, jax"
    f" {first['jax']}, commit {first['commit']}.",
  ]
  return "\n\n".join(text)


def _range(by_seed: Mapping[int, float]) -> str:
  values = [_UNIT * value for value in by_seed.values()]
  ends = (page.signed(end(values), 2) for end in (min, max))
  return f"{page.signed(statistics.mean(values), 2)} ({' to '.join(ends)})"


def _interval(difference: pairs.Difference) -> str:
  margin = difference.margin
  around = "" if margin is None else f" ± {_UNIT * margin:.2f}"
  return page.signed(_UNIT * difference.mean, 2) + around
