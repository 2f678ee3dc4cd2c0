# SPDX-License-Identifier: Apache-2.0
"""Times operators on a device, many calls in one program.

A call takes microseconds, and so does starting a program. So one program calls
an operator a given number of times, and a call is the difference between long
and short loops, over the difference in their lengths. The loop carries all
results, so that no compiler can leave out a part of them. Each call waits for
the one before it: its smallest argument depends on it. Compilers for CPUs may
still take what does not depend on that argument out of the loop; a barrier
keeps the others from it.
"""

from collections.abc import Callable, Sequence
import functools
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnres_jax.common import chips

# A loop is long enough for the clock, and a short one still runs the operator.
_LOOP_SECONDS, _SHORT = 0.1, 2
ROUNDS = 9


class Seconds(NamedTuple):
  """Of one call: from medians over rounds, the least and the largest round."""

  median: float
  least: float
  largest: float


def of_calls(
  function: Callable[..., Any],
  arguments: Sequence[jax.Array],
  *,
  rounds: int = ROUNDS,
) -> Seconds:
  """Seconds per call of `function(*arguments)`.

  Args:
    function: traceable; its results are arrays.
    arguments: on the device.
    rounds: of a short and a long loop each.
  """
  run = jax.jit(repeated(function))

  def seconds(count: int) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(count, *arguments))
    return time.perf_counter() - start

  seconds(_SHORT)
  # The start of a program counts for little once the loop is long enough.
  alone, count = seconds(_SHORT), 8
  while (took := seconds(_SHORT + count) - alone) < _LOOP_SECONDS / 4:
    count *= 4
  count = max(_SHORT, round(count * min(1.0, _LOOP_SECONDS / took)))
  short, long = [], []
  for _ in range(rounds):
    short.append(seconds(_SHORT))
    long.append(seconds(_SHORT + count))
  found = [(b - a) / count for a, b in zip(short, long, strict=True)]
  middle = (statistics.median(long) - statistics.median(short)) / count
  if middle <= 0:
    raise RuntimeError(
      f"{count} more calls took {middle * count:.1e} s: too short for the clock"
      " of this machine, or too much else runs on it"
    )
  return Seconds(middle, min(found), max(found))


def repeated(function: Callable[..., Any]) -> Callable[..., Any]:
  """(count, *arguments) -> results of the last of `count` calls in a row."""

  def run(count: jax.Array | int, *arguments: jax.Array) -> Any:
    shapes = jax.eval_shape(function, *arguments)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    floats = [
      i
      for i, x in enumerate(arguments)
      if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    small = min(floats, key=lambda i: arguments[i].size)

    def call(_, before):
      # Zero, unless a result is no number.
      first, *_ = jax.tree.leaves(before)
      one = first[(0,) * first.ndim]
      zero = jnp.isnan(one).astype(arguments[small].dtype)
      after = list(arguments)
      after[small] = after[small] + jnp.broadcast_to(zero, after[small].shape)
      after, _ = jax.lax.optimization_barrier((after, before))
      return function(*after)

    return jax.lax.fori_loop(0, count, call, zeros)

  return run


def least_bytes(function: Callable[..., Any], arguments: Any) -> int:
  """Arguments and results, each once."""
  results = jax.eval_shape(function, *arguments)
  return sum(
    x.size * jnp.dtype(x.dtype).itemsize
    for x in jax.tree.leaves((tuple(arguments), results))
  )


@functools.cache
def bandwidth() -> tuple[float, str]:
  """Bytes per second of the first device's memory, and where that is from."""
  chip = chips.chip_of(jax.devices()[0].device_kind)
  if chip is not None and chip.published_hbm_bytes_per_second:
    return chip.published_hbm_bytes_per_second, "published"
  return copy_rate(), "measured"


@functools.cache
def copy_rate() -> float:
  """Bytes per second, read plus written, of adding one to a large array."""
  tiny = jax.default_backend() == "cpu"
  x = jnp.zeros((2**23 if tiny else 2**28,), jnp.float32)
  return 2 * x.nbytes / of_calls(lambda x, y: x + y, (x, jnp.ones((1,)))).median


@functools.cache
def product_rate() -> float:
  """FLOPs per second of a large product in bfloat16 (float32 on a CPU)."""
  tiny = jax.default_backend() == "cpu"
  n = 512 if tiny else 8192
  x = jnp.ones((n, n), jnp.float32 if tiny else jnp.bfloat16)
  one = jnp.ones((1, 1), x.dtype)
  return 2 * n**3 / of_calls(lambda a, b, c: a @ b * c, (x, x, one)).median
