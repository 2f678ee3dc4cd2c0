# SPDX-License-Identifier: Apache-2.0
"""Where the time of a run went, over all its attempts, read from its rows.

Steps that were taken and then lost to a kill are not in metrics.jsonl any more
(they are taken again); what they cost is in the `resume` event that found them.
What a killed attempt did after its last row is nowhere.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Goodput:
  """Seconds of one run, or of several.

  Attributes:
    startup: from the call to the first step, less compiling: data, restoring.
    compile: of all programs.
    step: of steps that count, less waiting for data.
    data_wait: for the next batch; other work of the host hides none of it.
    checkpoint_wait: in which a save held up the training.
    evaluation: on the validation split, and of rows per depth.
    lost: steps and evaluations that a kill undid.
    lost_steps: how many steps those were.
  """

  startup: float = 0.0
  compile: float = 0.0
  step: float = 0.0
  data_wait: float = 0.0
  checkpoint_wait: float = 0.0
  evaluation: float = 0.0
  lost: float = 0.0
  lost_steps: int = 0

  def __add__(self, other: "Goodput") -> "Goodput":
    values = zip(dataclasses.astuple(self), dataclasses.astuple(other))
    return Goodput(*(a + b for a, b in values))

  @property
  def seconds(self) -> dict[str, float]:
    """What the time went into, by name."""
    parts = dataclasses.asdict(self)
    del parts["lost_steps"]
    return parts

  @property
  def total(self) -> float:
    """All that is accounted for, in seconds."""
    return sum(self.seconds.values())


def of_rows(rows: Iterable[Row]) -> Goodput:
  """From all rows of a run, as `metrics.read_rows` gives them."""
  seconds = dict.fromkeys(Goodput().seconds, 0.0)
  lost_steps = 0
  compiled = 0.0
  last_step = 0
  for row in rows:
    kind = row.get("event", row["split"])
    if kind in ("start", "resume"):
      lost_steps += row["lost_steps"]
      # Folders from before these were recorded have none.
      seconds["lost"] += row.get("lost_seconds", 0.0)
      compiled = 0.0
    elif kind == "compiled":
      seconds["compile"] += row["seconds"]
      compiled += row["seconds"]
    elif kind == "ready":
      seconds["startup"] += row["seconds"] - compiled
    elif kind == "train":
      span = row["step"] - last_step
      seconds["data_wait"] += span * row["data_wait_seconds"]
      seconds["step"] += span * (row["step_seconds"] - row["data_wait_seconds"])
      last_step = row["step"]
    elif kind in ("validation", "depth"):
      seconds["evaluation"] += row.get("seconds", 0.0)
    elif kind == "checkpoint":
      seconds["checkpoint_wait"] += row["blocked_seconds"]
  return Goodput(lost_steps=lost_steps, **seconds)


def lost(rows: Sequence[Row], resume_step: int) -> tuple[int, float]:
  """Steps past a checkpoint that were logged, and the seconds they took."""
  steps, seconds, last_step = 0, 0.0, 0
  for row in rows:
    if row["split"] == "train":
      span = row["step"] - max(last_step, resume_step)
      seconds += max(0, span) * row["step_seconds"]
      last_step = row["step"]
      steps = max(steps, last_step - resume_step)
    elif row["split"] != "event" and row["step"] > resume_step:
      seconds += row.get("seconds", 0.0)
  return steps, seconds
