# SPDX-License-Identifier: Apache-2.0
"""Who works on which microbatch when: interleaved 1F1B, 1F1B and GPipe.

A unit of work is a chunk of one microbatch, forward or backward. Three orders:

  fused   a tick has a forward and a backward slot on every rank. Microbatches
          go in groups of P; with microbatch m = g P + i and chunk c = v P + r,

            forward   at tick  g C + v P + i + r
            backward  at tick  C - 1 + g C + (V - 1 - v) P + i + (P - 1 - r).

          Every input arrives from the neighbouring rank exactly one tick
          earlier, the last chunk's backward follows its forward in the same
          tick, and the three phases (C - 1 ticks of forward alone, M V + P - C
          of both, C - 1 of backward alone) waste no slot but the ideal bubble
          of (P - 1) / (V M). At V = 1 a rank has up to 2 P - 1 microbatches in
          flight, as in eager 1F1B.
  1f1b    Megatron-LM's order, with one slot a tick: warm-up, then forward and
          backward in turn. At V = 1 this is plain 1F1B with at most P in
          flight; at V > 1 it is the interleaved order. It reaches the ideal
          bubble where ranks run freely, not in lockstep.
  gpipe   all forwards, then all backwards in the reverse order: what autodiff
          of the forward loop gives.

Nothing here needs a device; the tables are numpy arrays to be baked into a
program or drawn (`attnres_jax.pipeline.drawing`).
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from attnres_jax.pipeline import layout as layout_lib
from attnres_jax.pipeline import memory

# The names of the layout belong to the vocabulary of a schedule.
RULES = layout_lib.RULES
Layout = layout_lib.Layout
Transition = layout_lib.Transition
split_sublayers = layout_lib.split_sublayers
naive_total = layout_lib.naive_total
cached_total = layout_lib.cached_total
minimum_total = layout_lib.minimum_total


class Unit(NamedTuple):
  """One chunk of one microbatch."""

  chunk: int
  microbatch: int


class Phases(NamedTuple):
  """Ticks with forward work only, with both (or either), with backward only."""

  warmup: range
  steady: range
  drain: range


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
  """When every unit runs. Within a tick a rank does forward, then backward.

  Attributes:
    order: the key of `ORDERS` that made it.
    layout: chunks, ranks and blocks.
    num_microbatches: M.
    forward_ticks: int32 [C, M].
    backward_ticks: int32 [C, M].
  """

  order: str
  layout: Layout
  num_microbatches: int
  forward_ticks: np.ndarray
  backward_ticks: np.ndarray

  @property
  def num_ticks(self) -> int:
    return 1 + int(self.backward_ticks.max())

  @property
  def phases(self) -> Phases:
    first_backward = int(self.backward_ticks.min())
    after_forward = 1 + int(self.forward_ticks.max())
    start = min(first_backward, after_forward)
    end = max(first_backward, after_forward)
    return Phases(range(start), range(start, end), range(end, self.num_ticks))

  @functools.cached_property
  def forward(self) -> np.ndarray:
    """int32 [ticks, P, 2]: chunk and microbatch of a slot, -1 where idle."""
    return self._slots(self.forward_ticks)

  @functools.cached_property
  def backward(self) -> np.ndarray:
    """int32 [ticks, P, 2]: chunk and microbatch of a slot, -1 where idle."""
    return self._slots(self.backward_ticks)

  def at(self, tick: int, rank: int) -> tuple[Unit | None, Unit | None]:
    """The forward and the backward unit of a rank at a tick."""
    forward, backward = (
      Unit(*slot.tolist()) if slot[0] >= 0 else None
      for slot in (self.forward[tick, rank], self.backward[tick, rank])
    )
    return forward, backward

  def events(self, rank: int) -> list[memory.Event]:
    """The units of a rank in the order in which it runs them."""
    events = [
      (ticks[chunk, microbatch], backward, chunk, microbatch)
      for backward, ticks in enumerate(
        (self.forward_ticks, self.backward_ticks)
      )
      for chunk in self.layout.chunks(rank)
      for microbatch in range(self.num_microbatches)
    ]
    return [
      memory.Event(bool(backward), chunk, microbatch)
      for _, backward, chunk, microbatch in sorted(events)
    ]

  def peaks(
    self, rank: int, *, rule: str = "minimum", keep: str = "needed"
  ) -> memory.Peaks:
    """The most units, microbatches, blocks and gradients a rank holds.

    See `memory.block_lifetimes` for `rule` and `keep`.
    """
    return memory.peaks(self.layout, self.events(rank), rule=rule, keep=keep)

  def slot_pool(
    self, kind: str, *, rule: str = "minimum", keep: str = "needed"
  ) -> memory.SlotPool:
    """Slot numbers for "inputs", "blocks" or "gradients" on every rank."""
    return memory.slot_pool(
      self.layout,
      [self.events(rank) for rank in range(self.layout.num_ranks)],
      self.num_microbatches,
      kind,
      rule=rule,
      keep=keep,
    )

  def start_times(
    self,
    forward_time: float = 1.0,
    backward_time: float = 1.0,
    *,
    lockstep: bool = True,
  ) -> dict[memory.Event, float]:
    """When each unit starts.

    Args:
      forward_time: of one chunk.
      backward_time: of one chunk.
      lockstep: all ranks start each tick together, and a tick is as long as its
        longest rank: one program with a collective in every tick. Otherwise a
        unit starts as soon as its rank and its input allow.
    """
    layout = self.layout
    ranks = range(layout.num_ranks)
    if not lockstep:
      orders = [self.events(rank) for rank in ranks]
      ends = _run(layout, orders, forward_time, backward_time)
      length = {False: forward_time, True: backward_time}
      return {
        event: end - length[event.backward] for event, end in ends.items()
      }
    forward_TP = forward_time * (self.forward[:, :, 0] >= 0)
    backward_TP = backward_time * (self.backward[:, :, 0] >= 0)
    length_T = (forward_TP + backward_TP).max(axis=1)
    start_T = np.cumsum(length_T) - length_T
    starts = {}
    for (chunk, microbatch), tick in np.ndenumerate(self.forward_ticks):
      starts[memory.Event(False, chunk, microbatch)] = float(start_T[tick])
    for (chunk, microbatch), tick in np.ndenumerate(self.backward_ticks):
      wait = forward_TP[tick, layout.rank(chunk)]
      event = memory.Event(True, chunk, microbatch)
      starts[event] = float(start_T[tick] + wait)
    return starts

  def total_time(
    self,
    forward_time: float = 1.0,
    backward_time: float = 1.0,
    *,
    lockstep: bool = True,
  ) -> float:
    """When the last unit ends; arguments as in `start_times`."""
    length = {False: forward_time, True: backward_time}
    starts = self.start_times(forward_time, backward_time, lockstep=lockstep)
    return max(
      start + length[event.backward] for event, start in starts.items()
    )

  def bubble(
    self,
    forward_time: float = 1.0,
    backward_time: float = 1.0,
    *,
    lockstep: bool = True,
  ) -> float:
    """Idle time of a rank over the time of its work, as in `start_times`."""
    units = self.num_microbatches * self.layout.num_virtual_stages
    work = units * (forward_time + backward_time)
    total = self.total_time(forward_time, backward_time, lockstep=lockstep)
    return total / work - 1

  def _slots(self, ticks: np.ndarray) -> np.ndarray:
    slots = np.full((self.num_ticks, self.layout.num_ranks, 2), -1, np.int32)
    for (chunk, microbatch), tick in np.ndenumerate(ticks):
      slots[tick, self.layout.rank(chunk)] = chunk, microbatch
    return slots


def make_schedule(
  order: str, layout: Layout, num_microbatches: int
) -> Schedule:
  """Schedules M microbatches over the chunks of a layout.

  Args:
    order: "fused", "1f1b" or "gpipe", see the top of this module.
    layout: chunks, ranks and blocks.
    num_microbatches: M; with V > 1 a multiple of P.

  Raises:
    ValueError: naming the argument, its value and what is accepted.
  """
  if order not in ORDERS:
    layout_lib.fail("order", order, "one of " + ", ".join(ORDERS))
  layout_lib.check_count("num_microbatches", num_microbatches)
  ranks = layout.num_ranks
  if layout.num_virtual_stages > 1 and num_microbatches % ranks:
    below = num_microbatches // ranks * ranks
    nearest = f"{below} or {below + ranks}" if below else f"{ranks}"
    layout_lib.fail(
      "num_microbatches",
      num_microbatches,
      f"a multiple of num_ranks={ranks}, such as {nearest}, with"
      f" num_virtual_stages={layout.num_virtual_stages}",
    )
  forward, backward = ORDERS[order](layout, num_microbatches)
  return Schedule(order, layout, num_microbatches, forward, backward)


def fused_forward_slot(tick, rank, num_ranks: int, num_virtual_stages: int):
  """(virtual stage, microbatch) of a rank's forward slot in the fused order.

  Plain arithmetic, so tick and rank may be traced. The slot is idle where the
  microbatch is below 0 or not below M.
  """
  return _fused_slot(tick - rank, num_ranks, num_virtual_stages)


def fused_backward_slot(tick, rank, num_ranks: int, num_virtual_stages: int):
  """The same for the backward slot."""
  chunks = num_ranks * num_virtual_stages
  since = tick - (chunks - 1) - (num_ranks - 1 - rank)
  turn, microbatch = _fused_slot(since, num_ranks, num_virtual_stages)
  return num_virtual_stages - 1 - turn, microbatch


def warmup_units(layout: Layout, num_microbatches: int, rank: int) -> int:
  """Forward units before a rank's first backward, but one, in order 1f1b."""
  ahead = layout.num_ranks - 1 - rank
  if layout.num_virtual_stages > 1:
    ahead = 2 * ahead + (layout.num_virtual_stages - 1) * layout.num_ranks
  return min(ahead, num_microbatches * layout.num_virtual_stages)


def _fused_slot(since, num_ranks: int, num_virtual_stages: int):
  chunks = num_ranks * num_virtual_stages
  group, turn = since // chunks, since % chunks
  return turn // num_ranks, group * num_ranks + turn % num_ranks


def _fused(layout: Layout, num_microbatches: int):
  chunk_C1 = np.arange(layout.num_chunks)[:, None]
  microbatch_M = np.arange(num_microbatches)
  ranks, chunks = layout.num_ranks, layout.num_chunks
  start_M = microbatch_M // ranks * chunks + microbatch_M % ranks
  # c = v P + r, so v P + r is c, and (V - 1 - v) P + P - 1 - r is C - 1 - c.
  forward_CM = start_M + chunk_C1
  backward_CM = start_M + 2 * (chunks - 1) - chunk_C1
  return forward_CM.astype(np.int32), backward_CM.astype(np.int32)


def _gpipe(layout: Layout, num_microbatches: int):
  forward_CM, _ = _fused(layout, num_microbatches)
  return forward_CM, 2 * forward_CM.max() + 1 - forward_CM


def _one_forward_one_backward(layout: Layout, num_microbatches: int):
  orders = [
    _megatron_events(layout, num_microbatches, rank)
    for rank in range(layout.num_ranks)
  ]
  ends = _run(layout, orders, 1, 1)
  ticks = np.empty((2, layout.num_chunks, num_microbatches), np.int32)
  for (backward, chunk, microbatch), end in ends.items():
    ticks[int(backward), chunk, microbatch] = end - 1
  return ticks[0], ticks[1]


def _megatron_events(
  layout: Layout, num_microbatches: int, rank: int
) -> list[memory.Event]:
  ranks, stages = layout.num_ranks, layout.num_virtual_stages

  def event(index: int, backward: bool) -> memory.Event:
    if stages == 1:
      return memory.Event(backward, rank, index)
    stage, microbatch = _fused_slot(index, ranks, stages)
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


ORDERS: Mapping[str, Callable[[Layout, int], tuple[np.ndarray, np.ndarray]]] = {
  "fused": _fused,
  "1f1b": _one_forward_one_backward,
  "gpipe": _gpipe,
}
