# SPDX-License-Identifier: Apache-2.0
"""The time of a step, instruction by instruction, on the links there are.

`report` adds up what a step computes, moves and sends, and takes the longest.
This walks through the compiled schedule instead:

- An instruction takes the longer of its compute and its memory. A core runs one
  at a time, so the compute of one hides no other's memory.
- What the compiler copies to the core or receives meanwhile uses the memory
  when instructions do not, and its end waits for it.
- Arrays are moved and sent in tiles: 1,168 columns take 1,280.
- A kernel computes what its own estimate says, with all of its tiles, and
  reads an array once that it is given twice. Kernels without an estimate share
  the FLOPs that their part needs at least.
- Products of float32 with the highest precision take six passes.
- A transfer takes as long as the links that its group of devices has; it waits
  for others on the same links. Its end waits for it: only work between its
  start and its end hides it, for as long as that takes.

A group that differs along one axis of a torus is a ring if the axis wraps
around, and a line if not. The end of a line receives everything over one link.
Axes wrap around in slices of v5e and v6e if they have 16 chips, in other ones
if the slice is made of whole cubes of 4 x 4 x 4.

The schedule is walked once for each of these assumptions, added one by one, so
that the difference from the sums has causes (`CAUSES`).
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import re
from typing import Any

import jax

from attnres_jax.common import chips
from attnres_jax.common import scopes
from attnres_jax.plan import attribution
from attnres_jax.plan import collectives
from attnres_jax.plan import hlo
from attnres_jax.plan import least as least_lib

_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
_PASSES = 6  # Of products of float32 with the highest precision.

# Why a step takes longer than its sums, in the order in which they are added.
CAUSES = IN_ORDER, TILES, PASSES, LINKS = (
  "instructions one by one",
  "whole tiles of memory",
  "passes and whole tiles of products",
  "links of the torus",
)


@dataclasses.dataclass
class Timeline:
  """Seconds per device and step.

  Attributes:
    seconds: of the step.
    up_to: of the step with each of the `CAUSES` and those before it; the last
      has them all.
    parts: of work, by part.
    waited_seconds: for transfers that nothing hides, by the axes of their
      group.
    flops: with all tiles and passes.
  """

  seconds: float
  up_to: dict[str, float]
  parts: dict[str, float]
  waited_seconds: dict[str, float]
  flops: float


def of_program(
  text: str,
  mesh: jax.sharding.Mesh,
  chip: chips.Chip,
  needs: Mapping[str, least_lib.Least],
) -> Timeline:
  """The time of a program on a mesh, from `compiled.as_text()`.

  `needs` is what each part needs at least, from `least.of_parts`.
  """
  return _Walk(text, mesh, chip, needs).timeline()


def link_bytes_per_second(
  coordinates: Sequence[Sequence[int]],
  shape: Sequence[int],
  chip: chips.Chip,
) -> float:
  """One-way bandwidth with which a device of a group can receive.

  The group's devices have coordinates in a torus of this shape. The chip's
  bandwidth is the sum over four links in a plane, six in a cube.
  """
  plane = chip.torus_axes == 2
  per_link = chip.link_bytes_per_second / (2 * chip.torus_axes)
  cubes = all(size % 4 == 0 for size in shape[: chip.torus_axes])
  links = 0
  for axis, size in enumerate(shape):
    if len({place[axis] for place in coordinates}) > 1:
      wraps = size >= 16 if plane else cubes
      links += 2 if wraps else 1
  return per_link * max(links, 1)


class _Walk:
  """The schedule of one program."""

  def __init__(
    self,
    text: str,
    mesh: jax.sharding.Mesh,
    chip: chips.Chip,
    needs: Mapping[str, least_lib.Least],
  ):
    self.program = hlo.Program(text, tiled=True)
    self.plain = hlo.Program(text)
    self.mesh, self.chip = mesh, chip
    self.owners = attribution.owners(self.program)
    self.places = [tuple(device.coords) for device in mesh.devices.flat]
    self.shape = [max(axis) + 1 for axis in zip(*self.places)]
    self.kernels = _Kernels(self.program, self._part, needs)
    self.cause = LINKS
    self.lengths: dict[str, float] = {}
    self.parts = collections.defaultdict[str, float](float)
    self.waited = collections.defaultdict[str, float](float)
    self.flops = 0.0

  def timeline(self) -> Timeline:
    up_to = {}
    for self.cause in CAUSES:
      self.lengths = {}
      up_to[self.cause] = self._length(self.program.entry)
    parts, waited = dict(self.parts), dict(self.waited)
    return Timeline(up_to[LINKS], up_to, parts, waited, self.flops)

  def _includes(self, cause: str) -> bool:
    """Whether the current walk has this cause."""
    return CAUSES.index(cause) <= CAUSES.index(self.cause)

  def _part(self, item: hlo.Instruction) -> str:
    return self.owners.get(item.place) or attribution.OTHER

  def _length(self, name: str) -> float:
    """Seconds of one execution of a computation."""
    if name not in self.lengths:
      self.lengths[name] = self._walk(name)
    return self.lengths[name]

  def _walk(self, name: str) -> float:
    count, _ = self.program.runs.get(name, (0.0, False))
    schedule = list(self.program.computations[name].values())
    program = self.program if self._includes(TILES) else self.plain
    nbytes = {item.name: moved for item, moved in program.moved(name)}
    starts: dict[int, list[Any]] = {}
    ends: dict[int, list[Any]] = {}
    if self._includes(LINKS):
      for start, end, transfer in collectives.transfers(self.program, name):
        starts.setdefault(start, []).append(transfer)
        ends.setdefault(end, []).append(transfer)
    clock = 0.0
    copies = _Copies()
    free: dict[str, float] = {}
    arrives: dict[int, float] = {}
    for at, item in enumerate(schedule):
      for transfer in starts.get(at, ()):
        axes, seconds = self._sent(transfer)
        begin = max(clock, free.get(axes, 0.0))
        free[axes] = arrives[id(transfer)] = begin + seconds
      moved, flops = nbytes.get(item.name, 0.0), self._flops(item)
      memory = moved / self.chip.hbm_bytes_per_second
      if item.op.endswith("-start"):
        copies.start(item.name, memory)
        work = 0.0
      elif item.op.endswith("-done"):
        work = copies.end(item.operands)
      else:
        work = max(flops / self.chip.peak_flops_per_second, memory)
        copies.use(work - memory)
      clock += work + self._called(item)
      if self.cause == LINKS:
        self.flops += count * flops
        self.parts[self._part(item)] += count * work
      for transfer in ends.get(at, ()):
        wait = max(0.0, arrives[id(transfer)] - clock)
        self.waited[self._sent(transfer)[0]] += count * wait
        clock += wait
    return clock

  def _called(self, item: hlo.Instruction) -> float:
    """Seconds of the computations that a control instruction runs."""
    called = dict(item.called())
    if item.op == "while":
      trips = scopes.mean_trips_of_name(item.op_name)
      if trips is None:
        trips = self.program.trips(item, called["condition"])
      return trips * self._length(called["body"])
    if item.op not in ("conditional", "call"):
      return 0.0
    lengths = [self._length(name) for _, name in item.called()]
    return sum(lengths) / max(len(lengths), 1)

  def _sent(self, transfer: collectives.Collective) -> tuple[str, float]:
    axes = collectives.axes_of(transfer.group, self.mesh.shape)
    rate = link_bytes_per_second(
      [self.places[i] for i in transfer.group], self.shape, self.chip
    )
    return axes, transfer.sent_bytes / rate

  def _flops(self, item: hlo.Instruction) -> float:
    if item.is_kernel:
      return self.kernels.flops(item, self._includes(PASSES))
    flops = 0.0
    for inner in (item, *self.program.inside(item)):
      highest = "operand_precision={highest" in inner.attributes
      passes = _PASSES if highest and self._includes(PASSES) else 1
      flops += passes * self.program.product_flops(inner)
    return flops


class _Copies:
  """Copies to and from memory that the compiler starts ahead of their use.

  They take turns, in seconds that instructions leave to the memory.
  """

  def __init__(self):
    self.waiting: dict[str, float] = {}

  def start(self, name: str, seconds: float) -> None:
    self.waiting[name] = seconds

  def use(self, seconds: float) -> None:
    """Copies for as long as the memory is free."""
    for name in tuple(self.waiting):
      if self.waiting[name] > seconds:
        self.waiting[name] -= max(0.0, seconds)
        return
      seconds -= self.waiting.pop(name)

  def end(self, names: Sequence[str]) -> float:
    """Seconds until one that has started is over, and so those before it."""
    seconds = 0.0
    for end in names:
      while end in self.waiting:
        first = next(iter(self.waiting))
        seconds += self.waiting.pop(first)
    return seconds


class _Kernels:
  """What kernels compute.

  By their own estimates. Kernels of a part that have none share what the others
  leave of its need. With `whole=False`, all kernels of a part together only
  compute what the part needs at least, in proportion.
  """

  def __init__(
    self,
    program: hlo.Program,
    part_of: Callable[[hlo.Instruction], str],
    needs: Mapping[str, least_lib.Least],
  ):
    self.part_of = part_of
    products, estimates, silent = (
      collections.defaultdict[str, float](float) for _ in range(3)
    )
    for name, (count, _) in program.runs.items():
      for item in program.computations[name].values():
        if not item.is_kernel:
          products[part_of(item)] += count * program.product_flops(item)
        elif estimate := _ESTIMATE.search(item.attributes):
          estimates[part_of(item)] += count * float(estimate[1])
        else:
          silent[part_of(item)] += count
    self.shares: dict[str, float] = {}
    self.scales: dict[str, float] = {}
    for part in {**estimates, **silent}:
      needed = needs.get(part, least_lib.Least()).flops or 0.0
      needed = max(0.0, needed - products.get(part, 0.0))
      estimated = estimates.get(part, 0.0)
      missing = max(0.0, needed - estimated) if part in silent else 0.0
      self.shares[part] = missing / silent.get(part, 1.0)
      self.scales[part] = needed / ((estimated + missing) or 1.0)

  def flops(self, kernel: hlo.Instruction, every_pass: bool) -> float:
    part = self.part_of(kernel)
    estimate = _ESTIMATE.search(kernel.attributes)
    flops = float(estimate[1]) if estimate else self.shares.get(part, 0.0)
    return flops * (1.0 if every_pass else self.scales.get(part, 0.0))
