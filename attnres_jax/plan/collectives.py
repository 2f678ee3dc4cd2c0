# SPDX-License-Identifier: Apache-2.0
"""Transfers between the devices of a compiled program (`hlo`)."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import math
import re

import numpy as np

from attnres_jax.plan import gpu_products
from attnres_jax.plan import hlo

COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "ragged-all-to-all",
  "collective-permute",
)
_MEGASCALE = "xla_megascale_runtime"


@dataclasses.dataclass(frozen=True)
class Collective:
  """A transfer between devices.

  Attributes:
    kind: of `COLLECTIVES`.
    group: partitions that take part, one group of them.
    arrays: inputs of each device.
    sent_bytes: per device and execution, on a ring.
    count: how often it runs; the mean over the branches of conditionals.
    in_loop: whether it is inside a loop.
    overlapped: whether anything is computed between its start and its end.
    place: of its instruction.
  """

  kind: str
  group: tuple[int, ...]
  arrays: tuple[hlo.Array, ...]
  sent_bytes: float
  count: float
  in_loop: bool
  overlapped: bool
  place: tuple[str, str]


def of_program(program: hlo.Program) -> list[Collective]:
  """Every collective once, even if the compiler split it into pieces."""
  return [
    op
    for name in program.runs
    if name not in program.fused
    for _, _, op in transfers(program, name)
  ]


def bytes_between_slices(program: hlo.Program) -> float:
  """Bytes that a device hands to the data-centre network.

  The compiler makes collectives between slices `send`s to a host, where
  Megascale takes over.
  """
  return sum(
    count * instruction.arrays[0].nbytes
    for name, (count, _) in program.runs.items()
    for instruction in program.computations[name].values()
    if instruction.op == "send" and _MEGASCALE in instruction.attributes
  )


def transfers(
  program: hlo.Program, name: str
) -> list[tuple[int, int, Collective]]:
  """(start, end, collective) of a computation, as places in its schedule."""
  count, in_loop = program.runs[name]
  schedule = list(program.computations[name].values())
  # Where its pieces are, and one piece.
  pieces: dict[str, tuple[list[int], hlo.Instruction]] = {}
  for at, instruction in enumerate(schedule):
    for key, piece in _pieces(program, instruction):
      entry = pieces.setdefault(key, ([], piece))
      entry[0].extend((at, _end(schedule, at)))
  sent = []
  for where, piece in pieces.values():
    start, end = min(where), max(where)
    overlapped = any(map(_computes, schedule[start + 1 : end]))
    op = _collective(program, piece, count, in_loop, overlapped)
    sent.append((start, end, op))
  return sent


def axes_of(group: Sequence[int], mesh_shape: Mapping[str, int]) -> str:
  """The mesh axes along which the partitions of a group differ."""
  coordinates = np.unravel_index(list(group), tuple(mesh_shape.values()))
  return "+".join(
    axis
    for axis, along in zip(mesh_shape, coordinates)
    if len(set(along.tolist())) > 1
  )


def _pieces(
  program: hlo.Program, instruction: hlo.Instruction
) -> Iterator[tuple[str, hlo.Instruction]]:
  """(name of the whole, collective) of pieces in an instruction."""
  if instruction.op.removesuffix("-start") in COLLECTIVES:
    # Overlapped pieces share a chain; others have a name.
    chain = re.search(r"chain_id=\"\d+\"", instruction.attributes)
    yield chain[0] if chain else instruction.name, instruction
  if instruction.op not in hlo.CONTROL:
    for _, called in instruction.called():
      for inner in program.computations[called].values():
        yield from _pieces(program, inner)


def _collective(
  program: hlo.Program,
  instruction: hlo.Instruction,
  count: float,
  in_loop: bool,
  overlapped: bool,
) -> Collective:
  computation, _ = instruction.place
  body = program.computations[computation]
  kind = instruction.op.removesuffix("-start")
  if computation.startswith("%all-reduce-scatter"):
    # Of the sum, this fusion only computes the part of each device.
    kind = "reduce-scatter"
  group = _group(instruction.attributes)
  arrays = tuple(
    array
    for operand in instruction.operands
    if operand in body
    for array in body[operand].arrays
  )
  sent = _sent(kind, sum(a.nbytes for a in arrays), len(group))
  return Collective(
    kind, group, arrays, sent, count, in_loop, overlapped,
    instruction.place,
  )  # fmt: skip


def _end(schedule: Sequence[hlo.Instruction], at: int) -> int:
  """Where the asynchronous instruction at `at` ends; `at` for other ones."""
  start = schedule[at]
  if start.op.endswith("-start"):
    for i, instruction in enumerate(schedule[at:], at):
      if (
        instruction.op.endswith("-done") and start.name in instruction.operands
      ):
        return i
  return at


def _computes(instruction: hlo.Instruction) -> bool:
  """Whether it computes, rather than moving data or starting a collective."""
  if instruction.op == "custom-call":
    return instruction.is_kernel or gpu_products.is_library(instruction)
  working = ("fusion", "convolution", "while", "conditional")
  return instruction.op in working and not (
    instruction.starts_collective or instruction.ends_collective
  )


def _group(attributes: str) -> tuple[int, ...]:
  """One of the groups of partitions that a collective connects."""
  pairs = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", attributes)
  if pairs:
    return int(pairs[1]), int(pairs[2])
  listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
  if listed:
    return tuple(int(i) for i in listed[1].split(","))
  iota = re.search(
    r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
  )
  if iota:
    sizes, shape = (
      [int(i) for i in text.split(",")] for text in (iota[1], iota[2])
    )
    ids = np.arange(math.prod(shape)).reshape(shape)
    if iota[3]:
      ids = ids.transpose([int(i) for i in iota[3].split(",")])
    return tuple(ids.reshape(sizes)[0].ravel().tolist())
  mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes)
  if mesh:
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
    chosen = re.findall(r"'(\w+)'", mesh[2])
    ids = np.arange(math.prod(map(int, sizes.values())))
    ids = ids.reshape([int(size) for size in sizes.values()])
    where = tuple(slice(None) if axis in chosen else 0 for axis in sizes)
    return tuple(ids[where].ravel().tolist())
  return (0,)


def _sent(kind: str, operand_bytes: float, size: int) -> float:
  """Bytes that a device sends with the best ring algorithm."""
  others = size - 1
  return (
    operand_bytes
    * {
      "all-gather": others,
      "all-reduce": 2 * others / size,
      "reduce-scatter": others / size,
      "all-to-all": others / size,
      "ragged-all-to-all": others / size,
      "collective-permute": 1,
    }[kind]
  )
