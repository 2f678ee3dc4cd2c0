# SPDX-License-Identifier: Apache-2.0
"""The time of a step, instruction by instruction, on the links there are.

`report` adds up what a step computes, moves and sends, and takes the longest.
This walks through the compiled schedule instead:

- An instruction takes the longer of its compute and its memory. What the
  compiler copies to the core or receives meanwhile is memory of the next.
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
"""

from collections.abc import Mapping, Sequence
import dataclasses
import re
from typing import Any

import jax

from attnres_jax.common import chips
from attnres_jax.common import scopes
from attnres_jax.plan import attribution
from attnres_jax.plan import hlo
from attnres_jax.plan import least as least_lib

_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
_KERNEL = "tpu_custom_call"
_PASSES = 6  # Of products of float32 with the highest precision.


@dataclasses.dataclass
class Timeline:
  """Seconds per device and step.

  Attributes:
    seconds: of the step.
    parts: of work, by part.
    waited_seconds: for transfers that nothing hides, by the axes of their
      group.
    sent_seconds: of all transfers, by the axes of their group.
    flops: with all tiles and passes.
    moved_bytes: with all tiles.
  """

  seconds: float
  parts: dict[str, float]
  waited_seconds: dict[str, float]
  sent_seconds: dict[str, float]
  flops: float
  moved_bytes: float


def of_program(
  text: str,
  mesh: jax.sharding.Mesh,
  chip: chips.Chip,
  needs: Mapping[str, least_lib.Least],
) -> Timeline:
  """The time of a program, from `compiled.as_text()`.

  Args:
    text: see above.
    mesh: that it was compiled for.
    chip: the kind of its devices.
    needs: what each part needs at least, `least.of_parts`.
  """
  return _Walk(text, mesh, chip, needs).timeline()


def link_bytes_per_second(
  coordinates: Sequence[Sequence[int]],
  shape: Sequence[int],
  chip: chips.Chip,
) -> float:
  """One-way bandwidth with which a device of a group can receive.

  Args:
    coordinates: of the devices of the group in the torus.
    shape: of the torus.
    chip: whose bandwidth is the sum over four links in a plane, six in a cube.
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
    self.mesh, self.chip = mesh, chip
    self.owners = attribution.owners(self.program)
    self.places = [tuple(device.coords) for device in mesh.devices.flat]
    self.shape = [max(axis) + 1 for axis in zip(*self.places)]
    self.runs = self.program.runs
    self.missing = self._missing_flops(needs)
    self.result = Timeline(0.0, {}, {}, {}, 0.0, 0.0)
    self.lengths: dict[str, float] = {}

  def timeline(self) -> Timeline:
    self.result.seconds = self._length(self.program.entry)
    return self.result

  def _length(self, name: str) -> float:
    """Seconds of one execution of a computation."""
    if name not in self.lengths:
      self.lengths[name] = self._walk(name)
    return self.lengths[name]

  def _walk(self, name: str) -> float:
    count, _ = self.runs.get(name, (0.0, False))
    schedule = list(self.program.computations[name].values())
    nbytes = {one.name: moved for one, moved in self.program.moved(name)}
    starts: dict[int, list[Any]] = {}
    ends: dict[int, list[Any]] = {}
    for start, end, transfer in self.program.transfers(name):
      starts.setdefault(start, []).append(transfer)
      ends.setdefault(end, []).append(transfer)
    clock, waiting_bytes = 0.0, 0.0
    free: dict[str, float] = {}
    arrives: dict[int, float] = {}
    for at, one in enumerate(schedule):
      for transfer in starts.get(at, ()):
        axes, seconds = self._sent(transfer)
        begin = max(clock, free.get(axes, 0.0))
        free[axes] = arrives[id(transfer)] = begin + seconds
        _add(self.result.sent_seconds, axes, count * seconds)
      moved = nbytes.get(one.name, 0.0)
      flops = self._flops(one)
      self.result.flops += count * flops
      self.result.moved_bytes += count * moved
      waiting_bytes += moved
      if flops or not one.op.endswith("-start"):
        work = max(
          flops / self.chip.peak_flops_per_second,
          waiting_bytes / self.chip.hbm_bytes_per_second,
        )
        waiting_bytes, clock = 0.0, clock + work
        part = self.owners.get(one.place) or attribution.OTHER
        _add(self.result.parts, part, count * work)
      clock += self._called(one)
      for transfer in ends.get(at, ()):
        wait = max(0.0, arrives[id(transfer)] - clock)
        _add(self.result.waited_seconds, self._sent(transfer)[0], count * wait)
        clock += wait
    return clock

  def _called(self, one: hlo.Instruction) -> float:
    """Seconds of the computations that a control instruction runs."""
    called = dict(one.called())
    if one.op == "while":
      trips = scopes.mean_trips_of_name(one.op_name)
      if trips is None:
        trips = self.program.trips(one, called["condition"])
      return trips * self._length(called["body"])
    if one.op not in ("conditional", "call"):
      return 0.0
    lengths = [self._length(name) for _, name in one.called()]
    return sum(lengths) / max(len(lengths), 1)

  def _sent(self, transfer: hlo.Collective) -> tuple[str, float]:
    axes = hlo.axes_of(transfer.group, self.mesh.shape)
    rate = link_bytes_per_second(
      [self.places[i] for i in transfer.group], self.shape, self.chip
    )
    return axes, transfer.sent_bytes / rate

  def _flops(self, one: hlo.Instruction) -> float:
    if _KERNEL in one.attributes:
      estimate = _ESTIMATE.search(one.attributes)
      part = self.owners.get(one.place) or attribution.OTHER
      return float(estimate[1]) if estimate else self.missing.get(part, 0.0)
    inside = self.program.inside(one)
    return sum(map(self._product_flops, (one, *inside)))

  def _product_flops(self, one: hlo.Instruction) -> float:
    passes = _PASSES if "operand_precision={highest" in one.attributes else 1
    return passes * self.program.product_flops(one)

  def _missing_flops(
    self, needs: Mapping[str, least_lib.Least]
  ) -> dict[str, float]:
    """FLOPs of a kernel without an estimate, by part."""
    known: dict[str, float] = {}
    silent: dict[str, float] = {}
    for name, (count, _) in self.runs.items():
      for one in self.program.computations[name].values():
        part = self.owners.get(one.place) or attribution.OTHER
        flops = self.program.product_flops(one)
        if _KERNEL in one.attributes:
          estimate = _ESTIMATE.search(one.attributes)
          flops = float(estimate[1]) if estimate else 0.0
          if not estimate:
            _add(silent, part, count)
        _add(known, part, count * flops)
    return {
      part: max(0.0, (needs[part].flops or 0.0) - known[part]) / runs
      for part, runs in silent.items()
      if part in needs
    }


def _add(sums: dict[str, float], name: str, value: float) -> None:
  sums[name] = sums.get(name, 0.0) + value
