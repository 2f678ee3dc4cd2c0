# SPDX-License-Identifier: Apache-2.0
"""Training-step times of several configs, measured in turn."""

from collections.abc import Mapping
import os
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.common import sharding
from attnres_jax.train import train_state
from experiments import measure as measure_lib

Row = Mapping[str, Any]


def measure(
  configs: Mapping[str, config_lib.RunConfig], *, rounds: int = 12
) -> dict[str, Row]:
  """Columns of results.csv by config name; the first config is the baseline.

  `step_time_ratio` is the median over rounds of a step's time over the
  baseline's time in the same round, with its range; `step_seconds` is the
  baseline's median times this ratio. `step_load` is the load of the machine
  over its number of processors.
  """
  steps = {name: _Stepper(config) for name, config in configs.items()}
  times = measure_lib.in_turn(steps, rounds)
  first = times[next(iter(times))]
  load = os.getloadavg()[0] / (os.cpu_count() or 1)
  return {name: _columns(own, first, load) for name, own in times.items()}


def busy(rows: Mapping[str, Row]) -> str:
  """Why the times say nothing, or "".

  Either other programs competed for the processors, or the ratio that is
  farthest from 1 varied between rounds by more than its distance from 1.

  Args:
    rows: the columns of `measure`, by scheme.
  """
  if not all("step_load" in row for row in rows.values()):
    return "the rows are from before ranges were measured"
  load = max(float(row["step_load"]) for row in rows.values())
  if load > _MOST_LOAD:
    return f"the machine was busy (load {load:.1f} per processor)"
  apart = lambda row: abs(float(row["step_time_ratio"]) - 1)
  widest = max(rows.values(), key=apart)
  low, high = (float(widest[f"step_time_ratio_{end}"]) for end in _ENDS)
  if high - low > apart(widest):
    return "the machine was busy (rounds vary by more than schemes)"
  return ""


_ENDS = "min", "max"
# Our own threads load each processor once; one more runs Python.
_MOST_LOAD = 1.5


def _columns(own, first, load: float) -> dict[str, str]:
  found = measure_lib.ratios(own, first)
  base = measure_lib.ratios(first, first)["seconds"]
  return {
    "step_seconds": f"{base * found['ratio']:.4f}",
    "step_time_ratio": f"{found['ratio']:.3f}",
    **{
      f"step_time_ratio_{end}": f"{found[f'ratio_{end}']:.3f}" for end in _ENDS
    },
    "step_load": f"{load:.2f}",
  }


class _Stepper:
  """Runs a training step on one batch per call."""

  def __init__(self, config: config_lib.RunConfig):
    mesh = sharding.make_mesh(config.mesh)
    batches = data.open_dataset(config.data, "train").batches()
    self._batch = sharding.shard_batch(next(batches), mesh)
    batches.close()
    program = train_state.make_program(config, mesh)
    self._state = program.init_state()
    self._step = program.train_step.lower(self._state, self._batch).compile()

  def __call__(self):
    self._state, metrics = self._step(self._state, self._batch)
    return self._state, metrics
