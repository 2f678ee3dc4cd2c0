# SPDX-License-Identifier: Apache-2.0
"""The memory of a rank for the microbatches in flight (section 4.1).

A rank holds three kinds of activation-sized vectors: the running sum that
entered each (microbatch, chunk) unit, kept from its forward to its backward;
the cached block representations; and, in backward, their gradients. The
schedule determines when each is first and last used, so slots of a pool can be
assigned on the host, and the pool is as large as the maximum number of live
vectors.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import heapq
from typing import NamedTuple

import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.pipeline import layout as layout_lib

KINDS = ("inputs", "blocks", "gradients")


class Event(NamedTuple):
  """One unit of work of a rank: a chunk, forward or backward."""

  backward: bool
  chunk: int
  microbatch: int


class Lifetime(NamedTuple):
  """A vector, from the first to the last event (inclusive) that uses it."""

  key: tuple[int, ...]
  start: int
  end: int


@dataclasses.dataclass(frozen=True)
class Peaks:
  """The most that one rank holds at once.

  Attributes:
    units: (microbatch, chunk) pairs between forward and backward, each with
      its checkpointed input.
    microbatches: number of distinct microbatches among them.
    blocks: cached block representations, including the embedding.
    gradients: accumulated gradients of block representations.
  """

  units: int
  microbatches: int
  blocks: int
  gradients: int


@dataclasses.dataclass(frozen=True, eq=False)
class SlotPool:
  """Slot numbers, the same pool size on every rank.

  Attributes:
    size: slots a rank needs.
    slots: int32, where a unit reads or writes a vector, on the rank of its
      chunk; -1 if it does neither. The shape is [C, M] for inputs, [C, M, N +
      1] for blocks (of the forward unit) and gradients (of the backward unit).
  """

  size: int
  slots: np.ndarray


def peaks(
  layout: layout_lib.Layout,
  events: Sequence[Event],
  *,
  rule: str = "minimum",
) -> Peaks:
  """The most that a rank holds while it works through its `events`."""
  inputs = input_lifetimes(events)
  return Peaks(
    units=_num_slots(inputs),
    microbatches=_max_microbatches(inputs, len(events)),
    blocks=_num_slots(block_lifetimes(layout, events, rule=rule)),
    gradients=_num_slots(gradient_lifetimes(layout, events, rule=rule)),
  )


def slot_pool(
  layout: layout_lib.Layout,
  events: Sequence[Sequence[Event]],
  num_microbatches: int,
  kind: str,
  *,
  rule: str = "minimum",
) -> SlotPool:
  """Assigns slots to one kind of vector (of `KINDS`) on every rank.

  `events` are given for each rank. Inputs get a slot if they are running sums
  that a boundary carries.
  """
  if kind not in KINDS:
    config_lib.fail_argument("kind", kind, "one of " + ", ".join(KINDS))
  shape: tuple[int, ...] = (layout.num_chunks, num_microbatches)
  if kind != "inputs":
    shape += (layout.num_blocks + 1,)
  slots = np.full(shape, -1, np.int32)
  size = 0
  for of_rank in events:
    if kind == "inputs":
      lifetimes = [
        life
        for life in input_lifetimes(of_rank)
        if layout.has_partial(life.key[0])
      ]
    elif kind == "blocks":
      lifetimes = block_lifetimes(layout, of_rank, rule=rule)
    else:
      lifetimes = gradient_lifetimes(layout, of_rank, rule=rule)
    numbers = assign_slots(lifetimes)
    size = max(size, 1 + max(numbers, default=-1))
    for life, slot in zip(lifetimes, numbers):
      if kind == "inputs":
        slots[life.key] = slot
        continue
      microbatch, block, *chunk_of_input = life.key
      for backward, chunk, of in of_rank[life.start : life.end + 1]:
        if of != microbatch or backward != (kind == "gradients"):
          continue
        if chunk_of_input in ([], [chunk]):
          slots[chunk, microbatch, block] = slot
  return SlotPool(size, slots)


def input_lifetimes(events: Iterable[Event]) -> list[Lifetime]:
  """Lifetimes of the checkpointed inputs; keys are (chunk, microbatch)."""
  started, lifetimes = {}, []
  for time, event in enumerate(events):
    key = (event.chunk, event.microbatch)
    if event.backward:
      lifetimes.append(Lifetime(key, started.pop(key), time))
    else:
      started[key] = time
  return lifetimes


def block_lifetimes(
  layout: layout_lib.Layout, events: Iterable[Event], *, rule: str
) -> list[Lifetime]:
  """Lifetimes of the cached blocks of a rank; keys are (microbatch, block).

  Blocks that arrive with chunk c stay until the backward of chunk c, which is
  the last to read them. The naive rule keeps a copy per chunk, so its keys have
  the chunk as a third element. Under the minimum rule, a block that the rank
  computed stays until the backward of its next chunk, the last that reads it
  from the cache; without a next chunk it is not kept.
  """
  times = {event: time for time, event in enumerate(events)}
  lifetimes = []
  for event, start in times.items():
    if event.backward:
      continue
    _, chunk, microbatch = event

    def backward(chunk, microbatch=microbatch):
      return times[Event(True, chunk, microbatch)]

    made = layout.produced(chunk)
    arrived = layout.window(chunk, rule)
    if chunk == 0:
      arrived, made = made[:1], made[1:]
    for block in arrived:
      key = (microbatch, block) + ((chunk,) if rule == "naive" else ())
      lifetimes.append(Lifetime(key, start, backward(chunk)))
    if rule != "minimum" and layout.num_ranks > 1:
      continue
    last_reader = chunk + layout.num_ranks
    if last_reader < layout.num_chunks:
      end = backward(last_reader)
      lifetimes += [Lifetime((microbatch, b), start, end) for b in made]
  return lifetimes


def gradient_lifetimes(
  layout: layout_lib.Layout, events: Iterable[Event], *, rule: str
) -> list[Lifetime]:
  """Lifetimes of gradients of blocks on a rank; keys are (microbatch, block).

  The backward of chunk c adds the gradients that arrive over the boundary after
  it and the gradients of the chunk's reads. Then the gradients of the window of
  chunk c go to the previous rank, and the gradients of its blocks
  enter its sublayers.
  """
  started, lifetimes = {}, []
  for time, event in enumerate(events):
    if not event.backward:
      continue
    _, chunk, microbatch = event
    returned = layout.window(chunk + 1, rule)
    for block in {*returned, *range(layout.complete(chunk))}:
      started.setdefault((microbatch, block), time)
    for block in {*layout.window(chunk, rule), *layout.produced(chunk)}:
      start = started.pop((microbatch, block), None)
      if start is not None:
        lifetimes.append(Lifetime((microbatch, block), start, time))
  return lifetimes


def assign_slots(lifetimes: Sequence[Lifetime]) -> list[int]:
  """Assigns slots; vectors that are live at the same time never share one.

  Lowest free slot first, in order of start, which takes no more slots than the
  maximum number of live vectors. A slot is free again after the last event of
  its vector.
  """
  numbers, free, busy, size = [0] * len(lifetimes), [], [], 0
  for i in sorted(range(len(lifetimes)), key=lambda i: lifetimes[i].start):
    _, start, end = lifetimes[i]
    while busy and busy[0][0] < start:
      heapq.heappush(free, heapq.heappop(busy)[1])
    if not free:
      heapq.heappush(free, size)
      size += 1
    numbers[i] = heapq.heappop(free)
    heapq.heappush(busy, (end, numbers[i]))
  return numbers


def _num_slots(lifetimes: Sequence[Lifetime]) -> int:
  """The maximum number of live vectors."""
  return 1 + max(assign_slots(lifetimes), default=-1)


def _max_microbatches(inputs: Iterable[Lifetime], num_events: int) -> int:
  live: list[set[int]] = [set() for _ in range(num_events)]
  for (_, microbatch), start, end in inputs:
    for present in live[start : end + 1]:
      present.add(microbatch)
  return max(map(len, live), default=0)
