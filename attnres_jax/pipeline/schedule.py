# SPDX-License-Identifier: Apache-2.0
"""Which rank works on which microbatch when: the tables of a fused pipeline.

A unit of work is a chunk of one microbatch, forward or backward. A tick has a
forward and a backward slot on every rank, and microbatches move in groups of P.
With microbatch m = g P + i and chunk c = v P + r,

  forward   at tick  g C + v P + i + r
  backward  at tick  C - 1 + g C + (V - 1 - v) P + i + (P - 1 - r).

Every input arrives from the neighbouring rank exactly one tick earlier, and the
backward of the last chunk follows its forward in the same tick. The three
phases (C - 1 ticks of forward only, M V + P - C of both, C - 1 of backward
only) waste only the ideal bubble of (P - 1) / (V M). At V = 1, a rank has up to
2 P - 1 microbatches in flight, as in eager 1F1B.

Nothing here needs a device; the tables are numpy arrays that become constants
of a program or are drawn (notebooks/depth_attention.py).
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.config import errors
from attnres_jax.config import fields
from attnres_jax.pipeline import layout as layout_lib
from attnres_jax.pipeline import memory

# Re-exported, because a schedule uses the names of its layout.
RULES = layout_lib.RULES
Layout = layout_lib.Layout
split_sublayers = layout_lib.split_sublayers
naive_total = layout_lib.naive_total
cached_total = layout_lib.cached_total
minimum_total = layout_lib.minimum_total


class Unit(NamedTuple):
  """One chunk of one microbatch."""

  chunk: int
  microbatch: int


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
  """When every unit runs: ticks are int32 [C, M].

  Within a tick, a rank runs forward, then backward.
  """

  layout: Layout
  num_microbatches: int
  forward_ticks: np.ndarray
  backward_ticks: np.ndarray

  @property
  def num_ticks(self) -> int:
    return 1 + int(self.backward_ticks.max())

  @property
  def num_forward_ticks(self) -> int:
    """The number of ticks of a forward pass alone."""
    return 1 + int(self.forward_ticks.max())

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

  def peaks(self, rank: int, *, rule: str = "minimum") -> memory.Peaks:
    """The most that a rank holds while it works through its units."""
    events = self.events(rank)
    lifetimes = {
      kind: of_kind(self.layout, events, rule=rule)
      for kind, of_kind in memory.LIFETIMES.items()
    }
    units, blocks, gradients = map(memory.num_slots, lifetimes.values())
    microbatches = memory.max_microbatches(lifetimes["inputs"], len(events))
    return memory.Peaks(units, microbatches, blocks, gradients)

  def slot_pool(self, kind: str, *, rule: str = "minimum") -> memory.SlotPool:
    """Assigns slots to one kind of vector on every rank.

    The kind is "inputs", "blocks" or "gradients". Inputs get a slot if they
    are running sums that a boundary carries.
    """
    errors.check_in("kind", kind, memory.LIFETIMES)
    layout, is_input = self.layout, kind == "inputs"
    shape = layout.num_chunks, self.num_microbatches
    if not is_input:
      shape = *shape, layout.num_blocks + 1
    slots, size = np.full(shape, -1, np.int32), 0
    for rank in range(layout.num_ranks):
      events = self.events(rank)
      lifetimes = [
        life
        for life in memory.LIFETIMES[kind](layout, events, rule=rule)
        if not is_input or layout.has_partial(life.key[0])
      ]
      numbers = memory.assign_slots(lifetimes)
      size = max(size, 1 + max(numbers, default=-1))
      for life, slot in zip(lifetimes, numbers):
        if is_input:
          slots[life.key] = slot
          continue
        microbatch, block, *chunk_of_input = life.key
        for backward, chunk, of in events[life.start : life.end + 1]:
          if of != microbatch or backward != (kind == "gradients"):
            continue
          if chunk_of_input in ([], [chunk]):
            slots[chunk, microbatch, block] = slot
    return memory.SlotPool(size, slots)

  def bubble(
    self, forward_time: float = 1.0, backward_time: float = 1.0
  ) -> float:
    """Idle time of a rank over its work time, given the times of one chunk.

    All ranks start each tick together, and a tick takes as long as its slowest
    rank, as in one program with a collective in every tick.
    """
    forward_TP = forward_time * (self.forward[:, :, 0] >= 0)
    backward_TP = backward_time * (self.backward[:, :, 0] >= 0)
    busy_TP = forward_TP + backward_TP
    return float(busy_TP.max(axis=1).sum() / busy_TP.mean(axis=1).sum()) - 1

  def _slots(self, ticks: np.ndarray) -> np.ndarray:
    slots = np.full((self.num_ticks, self.layout.num_ranks, 2), -1, np.int32)
    for (chunk, microbatch), tick in np.ndenumerate(ticks):
      slots[tick, self.layout.rank(chunk)] = chunk, microbatch
    return slots


def make_schedule(layout: Layout, num_microbatches: int) -> Schedule:
  """Schedules M microbatches, with V > 1 a multiple of P, over the chunks.

  Raises:
    ValueError: naming the argument, its value and what is accepted.
  """
  fields.accept("num_microbatches", num_microbatches, fields.Size)
  ranks, chunks = layout.num_ranks, layout.num_chunks
  if layout.num_virtual_stages > 1 and num_microbatches % ranks:
    below = num_microbatches // ranks * ranks
    nearest = f"{below} or {below + ranks}" if below else f"{ranks}"
    config_lib.fail_argument(
      "num_microbatches",
      num_microbatches,
      f"a multiple of num_ranks={ranks}, such as {nearest}, with"
      f" num_virtual_stages={layout.num_virtual_stages}",
    )
  chunk_C1 = np.arange(chunks, dtype=np.int32)[:, None]
  microbatch_M = np.arange(num_microbatches, dtype=np.int32)
  start_M = microbatch_M // ranks * chunks + microbatch_M % ranks
  # c = v P + r, so v P + r is c, and (V - 1 - v) P + P - 1 - r is C - 1 - c.
  forward_CM = start_M + chunk_C1
  backward_CM = start_M + 2 * (chunks - 1) - chunk_C1
  return Schedule(layout, num_microbatches, forward_CM, backward_CM)
