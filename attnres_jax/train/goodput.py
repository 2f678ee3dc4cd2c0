# SPDX-License-Identifier: Apache-2.0
"""How a run spent its time, over all attempts, from its rows.

Steps that were lost to a kill are no longer in metrics.jsonl, because they are
repeated; the `resume` event records their cost. Whatever a killed attempt did
after its last row is not recorded.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any

from attnres_jax.common import chips

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Goodput:
  """Seconds of one run, or of several.

  Attributes:
    startup: from the call to the first step, without compiling: data,
      restoring.
    compile: of all programs.
    step: in steps that count, without waiting for data.
    data_wait: of the host for the next batch, also while the device computes.
    checkpoint_wait: training blocked by a save.
    evaluation: on the validation split, and for depth rows.
    lost: steps and evaluations lost to a kill.
    lost_steps: how many steps were lost.
    chip_seconds: all of these seconds, each times the chips of its attempt.
      Less than in a sweep's state.json, which counts from claim to release.
  """

  startup: float = 0.0
  compile: float = 0.0
  step: float = 0.0
  data_wait: float = 0.0
  checkpoint_wait: float = 0.0
  evaluation: float = 0.0
  lost: float = 0.0
  lost_steps: int = 0
  chip_seconds: float = 0.0

  def __add__(self, other: "Goodput") -> "Goodput":
    values = zip(dataclasses.astuple(self), dataclasses.astuple(other))
    return Goodput(*(a + b for a, b in values))

  @property
  def seconds(self) -> dict[str, float]:
    """The categories by name."""
    parts = dataclasses.asdict(self)
    del parts["lost_steps"], parts["chip_seconds"]
    return parts

  @property
  def total(self) -> float:
    """The sum of all categories, in seconds."""
    return sum(self.seconds.values())

  @property
  def chip_hours(self) -> float:
    """Chip-hours that a cloud charges for, as far as rows tell."""
    return self.chip_seconds / 3600


def of_rows(rows: Iterable[Row]) -> Goodput:
  """From all rows of a run, as `metrics.read_rows` gives them."""
  seconds = dict.fromkeys(Goodput().seconds, 0.0)
  lost_steps = 0
  compiled = 0.0
  last_step = 0
  before, chip_seconds, num_chips = 0.0, 0.0, 1.0
  for row in rows:
    kind = row.get("event", row["split"])
    if kind in ("start", "resume"):
      lost_steps += int(_number(row, "lost_steps"))
      seconds["lost"] += _number(row, "lost_seconds")
      compiled = 0.0
      # The attempts so far, with what the last one lost.
      now = sum(seconds.values())
      chip_seconds += (now - before) * num_chips
      before, num_chips = now, _num_chips(row)
    elif kind == "compiled":
      seconds["compile"] += _number(row, "seconds")
      compiled += _number(row, "seconds")
    elif kind == "ready":
      seconds["startup"] += _number(row, "seconds") - compiled
    elif kind == "train":
      span = row["step"] - last_step
      wait = _number(row, "data_wait_seconds")
      seconds["data_wait"] += span * wait
      seconds["step"] += span * (_number(row, "step_seconds") - wait)
      last_step = row["step"]
    elif kind in ("validation", "depth"):
      seconds["evaluation"] += _number(row, "seconds")
    elif kind == "checkpoint":
      seconds["checkpoint_wait"] += _number(row, "blocked_seconds")
  chip_seconds += (sum(seconds.values()) - before) * num_chips
  return Goodput(lost_steps=lost_steps, chip_seconds=chip_seconds, **seconds)


def lost(rows: Sequence[Row], resume_step: int) -> tuple[int, float]:
  """The logged steps after a checkpoint, and the seconds they took."""
  steps, seconds, last_step = 0, 0.0, 0
  for row in rows:
    if row["split"] == "train":
      span = row["step"] - max(last_step, resume_step)
      seconds += max(0, span) * _number(row, "step_seconds")
      last_step = row["step"]
      steps = max(steps, last_step - resume_step)
    elif row["split"] != "event" and row["step"] > resume_step:
      seconds += _number(row, "seconds")
  return steps, seconds


def _num_chips(row: Row) -> float:
  kind = row.get("device_kind")
  per_chip = chips.devices_per_chip(kind) if isinstance(kind, str) else 1
  return (_number(row, "devices") or 1.0) / per_chip


def _number(row: Row, name: str) -> float:
  """Zero if missing: the row is older than this field, or damaged."""
  value = row.get(name)
  return value if isinstance(value, int | float) else 0.0
