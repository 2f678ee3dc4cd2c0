# SPDX-License-Identifier: Apache-2.0
"""Training-step times of several configs, measured in turn.

Whatever else the machine does hits all configs alike when they take turns
within one process, which is not so for runs that follow one another.
"""

from collections.abc import Mapping
import statistics
import time

import jax

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax import sharding
from attnres_jax import train_state


def measure(
  configs: Mapping[str, config_lib.RunConfig], *, rounds: int = 12
) -> dict[str, float]:
  """Seconds per training step, by config name.

  The first config is the yardstick: its figure is its median, those of the
  others are its figure times the median over rounds of their ratio to it.
  """
  steps = {name: _Stepper(config) for name, config in configs.items()}
  for step in steps.values():
    step()
  times = {name: [] for name in configs}
  names = list(configs)
  for i in range(rounds):
    # Another one begins every time, as a place in the round may have a price.
    for name in names[i % len(names) :] + names[: i % len(names)]:
      times[name].append(steps[name]())
  first = times[next(iter(times))]
  yardstick = statistics.median(first)
  return {
    name: yardstick
    * statistics.median(t / t0 for t, t0 in zip(several, first, strict=True))
    for name, several in times.items()
  }


class _Stepper:
  """Takes training steps on one batch; a call returns how long one took."""

  def __init__(self, config: config_lib.RunConfig):
    mesh = sharding.make_mesh(config.mesh)
    batches = data.open_dataset(config.data, "train").batches()
    self._batch = sharding.shard_batch(next(batches), mesh)
    batches.close()
    program = train_state.make_program(config, mesh)
    self._state = program.init_state()
    self._step = program.train_step.lower(self._state, self._batch).compile()

  def __call__(self) -> float:
    start = time.perf_counter()
    self._state, metrics = self._step(self._state, self._batch)
    jax.block_until_ready((self._state, metrics))
    return time.perf_counter() - start
