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

from attnres_jax.pipeline import layout as layout_lib


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


def input_lifetimes(
  layout: layout_lib.Layout, events: Iterable[Event], *, rule: str
) -> list[Lifetime]:
  """Lifetimes of the checkpointed inputs; keys are (chunk, microbatch)."""
  del layout, rule
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


LIFETIMES = {
  "inputs": input_lifetimes,
  "blocks": block_lifetimes,
  "gradients": gradient_lifetimes,
}


def num_slots(lifetimes: Sequence[Lifetime]) -> int:
  """The maximum number of live vectors."""
  return 1 + max(assign_slots(lifetimes), default=-1)


def max_microbatches(inputs: Iterable[Lifetime], num_events: int) -> int:
  """The most microbatches that are between forward and backward at once."""
  live: list[set[int]] = [set() for _ in range(num_events)]
  for (_, microbatch), start, end in inputs:
    for present in live[start : end + 1]:
      present.add(microbatch)
  return max(map(len, live), default=0)
