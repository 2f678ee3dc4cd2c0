# SPDX-License-Identifier: Apache-2.0
"""Orders that a pipeline could run, to compare with the pipeline's order.

  python -m experiments.pipeline_cost.orders --order=1f1b --stage=4

draws one of them in the same form as `python -m attnres_jax.pipeline`:

  fused the order of `attnres_jax.pipeline`. 1f1b Megatron-LM's order, with one
  slot a tick: warm-up, then forward and
          backward in turn. At V = 1 this is plain 1F1B with at most P in
          flight; at V > 1 it is the interleaved order. It reaches the ideal
          bubble where ranks run freely, not in lockstep.
  gpipe   all forwards, then all backwards in the reverse order: what autodiff
          of the forward loop gives.
"""

from collections.abc import Callable, Mapping
import functools
import sys

import numpy as np

from attnres_jax.pipeline import __main__ as command
from attnres_jax.pipeline import memory
from attnres_jax.pipeline import schedule as schedule_lib

Layout, Schedule = schedule_lib.Layout, schedule_lib.Schedule


def gpipe(layout: Layout, num_microbatches: int) -> Schedule:
  """All forwards, then all backwards; arguments as in `fused`."""
  forward_CM = fused(layout, num_microbatches).forward_ticks
  backward_CM = 2 * forward_CM.max() + 1 - forward_CM
  return Schedule("gpipe", layout, num_microbatches, forward_CM, backward_CM)


def one_forward_one_backward(layout: Layout, num_microbatches: int) -> Schedule:
  """Megatron-LM's order; a tick has one unit. Arguments as in `fused`."""
  # For its checks of the arguments.
  fused(layout, num_microbatches)
  events = [
    _megatron_events(layout, num_microbatches, rank)
    for rank in range(layout.num_ranks)
  ]
  ticks = np.empty((2, layout.num_chunks, num_microbatches), np.int32)
  for (backward, *unit), end in _run(layout, events, 1, 1).items():
    ticks[int(backward), *unit] = end - 1
  return Schedule("1f1b", layout, num_microbatches, *ticks)


fused = schedule_lib.make_schedule
ORDERS: Mapping[str, Callable[[Layout, int], Schedule]] = {
  "fused": fused,
  "1f1b": one_forward_one_backward,
  "gpipe": gpipe,
}


def free_time(
  schedule: Schedule, forward_time: float, backward_time: float
) -> float:
  """When the last unit ends if units start as soon as rank and input allow.

  The schedule only says in which order each rank works; times are of a chunk.
  """
  layout = schedule.layout
  events = [schedule.events(rank) for rank in range(layout.num_ranks)]
  return max(_run(layout, events, forward_time, backward_time).values())


def warmup_units(layout: Layout, num_microbatches: int, rank: int) -> int:
  """Warm-up units of a rank: forwards before its first backward, minus one."""
  ahead = layout.num_ranks - 1 - rank
  if layout.num_virtual_stages > 1:
    ahead = 2 * ahead + (layout.num_virtual_stages - 1) * layout.num_ranks
  return min(ahead, num_microbatches * layout.num_virtual_stages)


def _megatron_events(
  layout: Layout, num_microbatches: int, rank: int
) -> list[memory.Event]:
  ranks, stages = layout.num_ranks, layout.num_virtual_stages

  def event(index: int, backward: bool) -> memory.Event:
    if stages == 1:
      return memory.Event(backward, rank, index)
    group, turn = divmod(index, layout.num_chunks)
    stage, microbatch = turn // ranks, group * ranks + turn % ranks
    stage = stages - 1 - stage if backward else stage
    return memory.Event(backward, stage * ranks + rank, microbatch)

  total = num_microbatches * stages
  warmup = warmup_units(layout, num_microbatches, rank)
  events = [event(index, False) for index in range(warmup)]
  for index in range(total - warmup):
    events += [event(warmup + index, False), event(index, True)]
  return events + [event(index, True) for index in range(total - warmup, total)]


def _run(
  layout: Layout,
  orders: list[list[memory.Event]],
  forward_time: float,
  backward_time: float,
) -> dict[memory.Event, float]:
  """When each unit ends if every rank follows its order and waits for inputs.

  Raises:
    RuntimeError: the orders wait for each other.
  """
  ends = {}
  following = [0] * layout.num_ranks
  free = [0.0] * layout.num_ranks
  total = sum(map(len, orders))
  while len(ends) < total:
    before = len(ends)
    for rank, order in enumerate(orders):
      while following[rank] < len(order):
        event = order[following[rank]]
        source = _input_of(layout, event)
        if source is not None and source not in ends:
          break
        start = max(free[rank], ends.get(source, 0))
        free[rank] = start + (backward_time if event.backward else forward_time)
        ends[event] = free[rank]
        following[rank] += 1
    if len(ends) == before:
      raise RuntimeError(f"ranks wait for each other after {before} units")
  return ends


def _input_of(layout: Layout, event: memory.Event) -> memory.Event | None:
  backward, chunk, microbatch = event
  if backward and chunk == layout.num_chunks - 1:
    return memory.Event(False, chunk, microbatch)
  if backward:
    return memory.Event(True, chunk + 1, microbatch)
  if chunk:
    return memory.Event(False, chunk - 1, microbatch)
  return None


main = functools.partial(command.main, orders=ORDERS)

if __name__ == "__main__":
  sys.exit(main())
