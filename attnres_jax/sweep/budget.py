# SPDX-License-Identifier: Apache-2.0
"""The price of a sweep before it is launched: tokens and chip-hours.

A run is priced on each slice on which the file of plans has its step: the
compiler's time of a step, times its steps and the chips of the slice. No chip
reaches the compiler's rates, and compiling, evaluating and saving come on top,
so a sweep costs more.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import re
import types

from attnres_jax import config as config_lib
from attnres_jax.common import chips
from attnres_jax.common import gpus
from attnres_jax.common import plans as plans_lib
from attnres_jax.common import text_table
from attnres_jax.common import topology
from attnres_jax.scaling import grid
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.train import account


@dataclasses.dataclass(frozen=True)
class Price:
  """A sweep on one slice, such as v5e-8: chip-hours of each run with a plan.

  Names of all other runs are missing.
  """

  slice_name: str
  hours: Mapping[str, float]
  missing: Sequence[str]

  @property
  def total(self) -> float:
    return sum(self.hours.values())


def tokens(runs: Sequence[grid.Run]) -> int:
  """Tokens on which all runs are trained."""
  return sum(account.tokens_of(folder_lib.run_config(run)) for run in runs)


def prices(
  runs: Sequence[grid.Run], rows: Sequence[Mapping[str, str]]
) -> list[Price]:
  """Prices on the slices on which any of the runs has a plan (`plans.rows`).

  A run with a mesh of its own has no price.
  """
  by_hash: dict[str, list[tuple[str, int]]] = {}
  for run in runs:
    config = folder_lib.run_config(run)
    if not config.optim.accumulate_steps:
      key = plans_lib.config_hash(config)
      by_hash.setdefault(key, []).append((run.name, config.train.steps))
  hours: dict[str, dict[str, float]] = {}
  first: dict[str, str] = {}
  for row in rows:
    for name, steps in by_hash.get(row["config_hash"], ()):
      number = int(row["devices"]) / chips.devices_per_chip(row["device_kind"])
      seconds = steps * float(row["step_seconds"]) * number
      # v5e-8 and v5e:2x4 are one slice.
      label = topology.topology_name(row["slice"])
      label = first.setdefault(label, row["slice"])
      hours.setdefault(label, {})[name] = seconds / 3600
  names = [run.name for run in runs]
  return [
    Price(slice_name, priced, [name for name in names if name not in priced])
    for slice_name, priced in hours.items()
  ]


def to_text(runs: Sequence[grid.Run], planned: Sequence[Price]) -> str:
  """Tokens of a sweep, and a line for each slice on which it has plans."""
  head = f"cost of {len(runs)} runs: {tokens(runs):,} tokens"
  if not planned:
    return f"{head}; chip-hours unknown, no run has a plan"
  lines = [
    [p.slice_name, f"{len(p.hours)} of {len(runs)}", f"{p.total:,.1f}"]
    for p in planned
  ]
  columns = "slice", "runs with a plan", "chip-hours of these, at least"
  return f"{head}\n{text_table.table(columns, lines)}"


def check_planned(
  runs: Sequence[grid.Run], offers: Sequence[Price], place: str
) -> None:
  """Refuses to launch runs that wait for a plan on devices without one.

  The place is a slice, or "gpus=8": any topology with as many GPUs.

  Raises:
    ConfigError: names the slices that have plans of all runs.
  """
  waiting = {
    run.name
    for run in runs
    if not folder_lib.run_config(run).optim.accumulate_steps
  }
  _, of_gpus, count = place.partition("gpus=")
  if of_gpus:
    here = [p for p in offers if _num_gpus(p.slice_name) == int(count)]
  else:
    here = [_on(place, runs, offers)]
  each = [[n for n in p.missing if n in waiting] for p in here]
  missing = min(each, key=len, default=sorted(waiting))
  if missing:
    planned = ", ".join(p.slice_name for p in offers if not p.missing)
    config_lib.fail_argument(
      "--set",
      place,
      f"a slice with plans of these runs: {planned or 'none has'};"
      f" {len(missing)} of {len(runs)} have none there, such as {missing[0]}."
      " Add them (python -m attnres_jax.plan.search --sweep --save), or leave"
      " out `planned`",
    )


def place_of(settings: types.SimpleNamespace) -> str | None:
  """Where a launcher's runs will train, for `check_planned`, if known."""
  given = collections.defaultdict(lambda: None, vars(settings))
  place = given["slice"] or given["accelerator"]
  if given["gpus"] and place in (None, "gpu"):
    return f"gpus={given['gpus'] * (given['nodes'] or given['workers'])}"
  if place is None or place == "cpu":
    return None
  # A plan is for one slice.
  several = given["slices"] or 1
  return f"{several} x {place}" if several > 1 else place


def _num_gpus(slice_name: str) -> int:
  """GPUs of a topology; 0 for slices of TPUs."""
  parsed = gpus.parse(slice_name)
  return parsed[1] * parsed[2] if parsed else 0


def _on(
  slice_name: str, runs: Sequence[grid.Run], offers: Sequence[Price]
) -> Price:
  """The price on a slice, by any of its names."""
  topology_name = topology.topology_name(slice_name)
  for price in offers:
    if topology.topology_name(price.slice_name) == topology_name:
      return price
  return Price(slice_name, {}, [run.name for run in runs])


def fitting(price: Price, most: float) -> tuple[str, float]:
  """The cheapest runs that cost at most `most` together.

  Runs go by the first word of their names, which is their size in a sweep over
  sizes.

  Returns:
    An expression for --only, and what these runs cost; empty and 0 if none fit.
  """
  groups: dict[str, float] = {}
  for name, hours in price.hours.items():
    word = name.partition("-")[0]
    groups[word] = groups.get(word, 0.0) + hours
  words, total = [], 0.0
  for word, hours in sorted(groups.items(), key=lambda pair: pair[1]):
    if total + hours > most:
      break
    words.append(re.escape(word))
    total += hours
  return f"^({'|'.join(words)})-" if words else "", total
