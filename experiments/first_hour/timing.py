# SPDX-License-Identifier: Apache-2.0
"""Times operators on a device, many calls in one program.

A call takes microseconds, and so does starting a program. So one program calls
an operator a given number of times, and the time of a call is the difference
between long and short loops, over the difference in their lengths.
"""

from collections.abc import Callable, Sequence
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# A loop is long enough for the clock, and a short one still runs the operator.
_LOOP_SECONDS, _SHORT = 0.1, 2


class Seconds(NamedTuple):
  """Time of one call: from medians over rounds, and the extreme rounds."""

  median: float
  least: float
  largest: float


def of_calls(
  function: Callable[..., Any], arguments: Sequence[jax.Array], rounds: int = 9
) -> Seconds:
  """Seconds per call of a traceable function, whose results are arrays."""
  run = jax.jit(repeated(function))
  return of_loops(
    lambda count: jax.block_until_ready(run(count, *arguments)), rounds
  )


def of_loops(call: Callable[[int], Any], rounds: int) -> Seconds:
  """Seconds per repetition of `call(repetitions)`, which waits for its end.

  Raises:
    RuntimeError: the clock of this machine is too coarse.
  """

  def seconds(count: int) -> float:
    start = time.perf_counter()
    call(count)
    return time.perf_counter() - start

  seconds(_SHORT)
  # The start of a program counts for little once the loop is long enough.
  overhead, count = seconds(_SHORT), 8
  while (took := seconds(_SHORT + count) - overhead) < _LOOP_SECONDS / 4:
    count *= 4
  count = max(_SHORT, round(count * min(1.0, _LOOP_SECONDS / took)))
  pairs = [(seconds(_SHORT), seconds(_SHORT + count)) for _ in range(rounds)]
  short, long = map(statistics.median, zip(*pairs))
  if long <= short:
    raise RuntimeError(f"{count} more calls took no time: too short to measure")
  each = [(b - a) / count for a, b in pairs]
  return Seconds((long - short) / count, min(each), max(each))


def repeated(function: Callable[..., Any]) -> Callable[..., Any]:
  """(count, *arguments) -> results of the last of `count` calls in a row.

  The loop carries all results, so that no compiler leaves out a part of them.
  The smallest argument depends on the call before, and a barrier keeps what
  does not depend on it in the loop.
  """

  def run(count: jax.Array | int, *arguments: jax.Array) -> Any:
    shapes = jax.eval_shape(function, *arguments)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    is_float = lambda i: jnp.issubdtype(arguments[i].dtype, jnp.floating)
    floats = filter(is_float, range(len(arguments)))
    small = min(floats, key=lambda i: arguments[i].size)

    def call(_, before):
      first, *_ = jax.tree.leaves(before)
      # Zero, unless the first result is NaN.
      zero = jnp.isnan(first[(0,) * first.ndim]).astype(arguments[small].dtype)
      after = list(arguments)
      after[small] = after[small] + jnp.broadcast_to(zero, after[small].shape)
      after, _ = jax.lax.optimization_barrier((after, before))
      return function(*after)

    return jax.lax.fori_loop(0, count, call, zeros)

  return run


def least_bytes(function: Callable[..., Any], arguments: Any) -> int:
  """Arguments and results, each once."""
  leaves = jax.tree.leaves((arguments, jax.eval_shape(function, *arguments)))
  return sum(x.size * jnp.dtype(x.dtype).itemsize for x in leaves)


def copy_rate() -> float:
  """Bytes per second, read plus written, of adding one to a large array."""
  tiny = jax.default_backend() == "cpu"
  x = jnp.zeros((2**23 if tiny else 2**28,), jnp.float32)
  return 2 * x.nbytes / of_calls(lambda x, y: x + y, (x, jnp.ones((1,)))).median


def product_rate() -> float:
  """FLOPs per second of a large product in bfloat16 (float32 on a CPU).

  Of normal numbers: products of ones need less power, and take less time.
  """
  tiny = jax.default_backend() == "cpu"
  n, dtype = (512, jnp.float32) if tiny else (8192, jnp.bfloat16)
  x = jax.random.normal(jax.random.key(0), (n, n)).astype(dtype)
  scale = jnp.ones((1, 1), dtype)
  return 2 * n**3 / of_calls(lambda a, b, c: a @ b * c, (x, x, scale)).median
