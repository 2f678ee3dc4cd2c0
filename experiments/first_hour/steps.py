# SPDX-License-Identifier: Apache-2.0
"""Steps of Block and Full AttnRes over PreNorm, as compiled for step_cost.

The programs of experiments/step_cost/tpu.py, at its sizes: the gradient of a
transformer's loss, and stacks whose sublayers cost nothing. Arms are timed in
turn in one process. PreNorm of a training step is timed in two forms, as a scan
over layers and unrolled, and ratios are to the faster one; the ratio of medians
is not used, but the median of the ratios of each round.
"""

from collections.abc import Callable, Iterator
import functools
import pathlib
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import csv_rows
from experiments import measure as measure_lib
from experiments.first_hour import budget
from experiments.first_hour import operators
from experiments.first_hour import rows as rows_lib
from experiments.step_cost import programs

PART = "steps"
_TABLE = pathlib.Path(__file__).parents[1] / "step_cost" / "tpu.csv"
_BASE, _SCANNED = "prenorm", "prenorm, scanned"
_BLOCK, _FULL, _PLAIN = "block, kernels", "full_attnres", "block, plain JAX"


def _sizes(stack, sublayers, block, batch, tokens, width, vocabulary=32768):
  return types.SimpleNamespace(
    stack=stack,
    sublayers=sublayers,
    block=block,
    batch=batch,
    tokens=tokens,
    width=width,
    vocabulary=vocabulary,
  )


# Sizes, arms beside PreNorm, and the seconds that are expected on a chip.
CASES = (
  (_sizes("training", 24, 3, 8, 1024, 1024), (_BLOCK,), 240),
  (_sizes("training", 32, 4, 8, 1024, 2048), (_BLOCK,), 300),
  (_sizes("training", 24, 3, 8, 1024, 1024), (_FULL,), 300),
  (_sizes("identity", 32, 8, 4, 4096, 2048), (_BLOCK,), 120),
  (_sizes("training", 32, 4, 8, 1024, 2048), (_FULL,), 400),
  (_sizes("identity", 16, 4, 4, 4096, 2048), (_BLOCK, _PLAIN), 120),
)
_SHORT = ((_sizes("training", 2, 1, 1, 32, 128, 128), (_BLOCK, _FULL), 15),)


def case_of(sizes: Any) -> str:
  """The sizes as text."""
  tokens = sizes.batch * sizes.tokens
  return (
    f"{sizes.stack}, d={sizes.width}, {sizes.sublayers} sublayers,"
    f" {tokens} tokens"
  )


def tasks(platform: str, short: bool) -> list[budget.Task]:
  """One per size and arms."""
  found = []
  for sizes, arms, seconds in _SHORT if short else CASES:
    if platform != "tpu" and sizes.stack == "identity":
      continue  # Its kernels are those of TPUs.
    call = functools.partial(measure, sizes, arms, 3 if short else 15)
    name = f"{case_of(sizes)}: {', '.join(arms)}"
    found.append(budget.Task(PART, name, call, seconds, alone=not short))
  return found


def measure(
  sizes: Any, arms: tuple[str, ...], rounds: int
) -> Iterator[dict[str, str]]:
  """A row of seconds per arm, and of its ratio to PreNorm."""
  # Both forms of PreNorm have the same weights, which fill a part of the chip.
  drawn: dict[Any, list[jax.Array]] = {}
  calls = {_BASE: call_of(sizes, _BASE, drawn)}
  if sizes.stack == "training":
    calls[_SCANNED] = call_of(sizes, _BASE, drawn, scan_layers=True)
  calls |= {arm: call_of(sizes, arm, drawn) for arm in arms}
  times = measure_lib.in_turn(calls, rounds)
  forms = [name for name in calls if name.startswith(_BASE)]
  median = {
    name: float(np.median([one.wall for one in found]))
    for name, found in times.items()
  }
  base = min(forms, key=median.__getitem__)
  chip, _ = operators.CHIPS.get(jax.devices()[0].device_kind, ("", 0))
  case = case_of(sizes)
  for arm, found in times.items():
    wall = [one.wall * 1e3 for one in found]
    yield rows_lib.make(
      "step",
      case,
      arm,
      measured=median[arm] * 1e3,
      spread=(min(wall), max(wall)),
      unit="ms",
      estimate=estimate(sizes, arm, chip, "estimate_ms"),
    )
  for arm in arms:
    ratios = measure_lib.ratios(times[arm], times[base])
    yield rows_lib.make(
      "step over PreNorm",
      case,
      arm,
      measured=ratios["ratio"],
      spread=(ratios["ratio_min"], ratios["ratio_max"]),
      limit=1.0,
      estimate=estimate(sizes, arm, chip, "estimate_ratio"),
      reason=f"over {base}, {rounds} rounds",
    )


def call_of(
  sizes: Any, arm: str, drawn: dict[Any, list[jax.Array]], **options: Any
) -> Callable[[], Any]:
  """A step on drawn arguments, compiled; adds what it draws to `drawn`."""
  step, structs = getattr(programs, sizes.stack)(arm, sizes, **options)
  leaves, tree = jax.tree.flatten(structs)
  key = tuple((x.shape, x.dtype) for x in leaves)
  if key not in drawn:
    drawn[key] = jax.jit(lambda: _draw(leaves, sizes.vocabulary))()
  arguments = tree.unflatten(drawn[key])
  compiled = jax.jit(step).lower(*arguments).compile()
  return functools.partial(compiled, *arguments)


def estimate(sizes: Any, arm: str, chip: str, column: str) -> float | None:
  """A cell of the compiled table for this chip; None if it has none."""
  row = compiled_row(sizes, arm, chip)
  return float(row[column]) if row and row[column] else None


def compiled_row(sizes: Any, arm: str, chip: str) -> rows_lib.Row | None:
  """The row of the compiled table of experiments/step_cost, if it has one."""
  wanted = {
    "stack": sizes.stack,
    "chip": chip,
    "arm": arm,
    "sublayers": str(sizes.sublayers),
    "block": str(sizes.block),
    "tokens": str(sizes.batch * sizes.tokens),
    "width": str(sizes.width),
  }
  for row in csv_rows.read(_TABLE):
    if wanted.items() <= row.items():
      return row
  return None


def _draw(leaves: Any, vocabulary: int) -> list[jax.Array]:
  """Small numbers for arrays, tokens for integers."""
  keys = jax.random.split(jax.random.key(0), len(leaves))

  def draw(key, struct):
    if jnp.issubdtype(struct.dtype, jnp.integer):
      return jax.random.randint(key, struct.shape, 0, vocabulary, struct.dtype)
    x = 0.02 * jax.random.normal(key, struct.shape)
    return x.astype(struct.dtype)

  return [draw(key, leaf) for key, leaf in zip(keys, leaves, strict=True)]
