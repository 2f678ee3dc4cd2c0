# SPDX-License-Identifier: Apache-2.0
"""Time of a step on eight CPU devices, variants in turn."""

from collections.abc import Callable, Iterator
import functools
import statistics
from typing import Any

import jax
import numpy as np

from attnres_jax import loss as loss_lib
from attnres_jax import models
from experiments import measure
from experiments.pipeline_cost import plans
from experiments.pipeline_cost import programs

SIZE = programs.Size(
  ranks=4, virtual_stages=2, data=2, sublayers=8, block_size=2,
  width=64, length=128, dtype="float32",
)  # fmt: skip
MICROBATCHES = 8
VARIANTS = ("prenorm", "block minimum", "block cached", "block naive")


def rows(rounds: int) -> Iterator[plans.Row]:
  """A row per variant: medians over rounds and quartiles of the ratios.

  All are compiled first and then run in turn, in alternating order. A ratio is
  a variant's time over PreNorm's in the same round. `cpu` is processor time of
  all devices together, which other processes disturb less than `wall` time, and
  in which waiting for a message costs nothing.
  """
  calls = {variant: _program(variant) for variant in VARIANTS}
  times = measure.in_turn(calls, rounds)
  for variant in VARIANTS:
    row = dict(variant=variant, rounds=rounds)
    for clock in measure.Seconds._fields:
      own = [getattr(seconds, clock) for seconds in times[variant]]
      base = [getattr(seconds, clock) for seconds in times["prenorm"]]
      ratios = np.asarray(own) / np.asarray(base)
      low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
      row |= {
        f"{clock}_ratio": round(float(middle), 4),
        f"{clock}_ratio_low": round(float(low), 4),
        f"{clock}_ratio_high": round(float(high), 4),
        f"{clock}_seconds": round(statistics.median(own), 4),
      }
    yield row


def _program(variant: str) -> Callable[[], Any]:
  """A compiled step of one batch."""
  config = programs.make_config(variant, SIZE, MICROBATCHES)
  pipeline = programs.make_pipeline(config)
  compiled = programs.lower(config, pipeline).compile()
  rng = np.random.default_rng(0)
  shape = config.data.batch_size, config.data.sequence_length + 1
  tokens: Any = rng.integers(0, config.model.vocab_size, shape, dtype=np.int32)
  batch = loss_lib.Examples.of({"tokens": tokens})
  model = models.build_model(config.model)
  arguments = jax.device_put((model, batch), compiled.input_shardings[0])
  return functools.partial(compiled, *arguments)
