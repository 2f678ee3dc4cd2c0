# SPDX-License-Identifier: Apache-2.0
"""Training-step times of several configs, measured in turn."""

from collections.abc import Mapping
import statistics

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.common import sharding
from attnres_jax.train import train_state
from experiments import measure as measure_lib


def measure(
  configs: Mapping[str, config_lib.RunConfig], *, rounds: int = 12
) -> dict[str, float]:
  """Seconds per training step, by config name.

  The first config is the baseline: its time is its median, and those of the
  others are this median times the median over rounds of their ratio to the
  baseline.
  """
  steps = {name: _Stepper(config) for name, config in configs.items()}
  times = measure_lib.in_turn(steps, rounds)
  first = times[next(iter(times))]
  found = {name: measure_lib.ratios(own, first) for name, own in times.items()}
  yardstick = statistics.median(one.wall for one in first)
  return {name: yardstick * row["ratio"] for name, row in found.items()}


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
