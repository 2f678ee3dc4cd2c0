# SPDX-License-Identifier: Apache-2.0
"""Which part of a step each instruction of its compiled program belongs to.

The compiler keeps the names of the traced operations, which contain their part
(`attnres_jax.common.scopes`). A fusion belongs to the part of its largest
matrix product, or else of its name. The compiler moves an addition into the
product before it for free, and a norm before a product would not be there
without the product. What the compiler adds, such as a copy to the core, has no
name. It belongs to the part that uses it first, or else to the part that made
it.
"""

from collections.abc import Mapping
import dataclasses

from attnres_jax.common import scopes
from attnres_jax.plan import collectives
from attnres_jax.plan import hlo

# Of an instruction: its computation, and its name in there.
Place = tuple[str, str]

# The part of what has no other.
OTHER = "other"


@dataclasses.dataclass
class Cost:
  """What a part does per device and step.

  Attributes:
    moved_bytes: of memory, read and written.
    flops: of matrix products outside of Pallas kernels.
    kernels: executions of Pallas kernels.
    sent_bytes: over links.
    overlapped_bytes: of these, those during whose transfer something is
      computed.
  """

  moved_bytes: float = 0.0
  flops: float = 0.0
  kernels: float = 0.0
  sent_bytes: float = 0.0
  overlapped_bytes: float = 0.0


def costs(program: hlo.Program) -> dict[str, Cost]:
  """The cost of each part; they add up to the program's."""
  by_part: dict[str, Cost] = {OTHER: Cost()}
  owner = owners(program)

  def part(place: Place) -> Cost:
    return by_part.setdefault(owner.get(place) or OTHER, Cost())

  for computation, (count, _) in program.runs.items():
    for instruction in program.computations[computation].values():
      flops = program.product_flops(instruction)
      if flops:
        part(instruction.place).flops += count * flops
      if instruction.is_kernel:
        part(instruction.place).kernels += count
  for count, instruction, nbytes in program.instructions():
    part(instruction.place).moved_bytes += count * nbytes
  for op in collectives.of_program(program):
    cost = part(op.place)
    cost.sent_bytes += op.count * op.sent_bytes
    cost.overlapped_bytes += op.count * op.sent_bytes * op.overlapped
  return by_part


def owners(program: hlo.Program) -> dict[Place, str | None]:
  """The part of every instruction; None if it has none."""
  owners: dict[Place, str | None] = {}
  for computation, body in program.computations.items():
    if computation in program.fused:
      continue
    named = {name: _named(program, item) for name, item in body.items()}
    for name, part in _from_neighbours(body, named).items():
      owners[computation, name] = part
      for inner in program.inside(body[name]):
        owners[inner.place] = scopes.of_name(inner.op_name) or part
  return owners


def _named(program: hlo.Program, instruction: hlo.Instruction) -> str | None:
  """The part that an instruction, or what is fused into it, names."""
  part_of_name = scopes.of_name(instruction.op_name)
  inner = [
    (program.product_flops(inner), part)
    for inner in program.inside(instruction)
    if (part := scopes.of_name(inner.op_name))
  ]
  largest, part = max(inner, default=(0.0, None))
  if largest or not part_of_name:
    return part
  return part_of_name


def _from_neighbours(
  body: Mapping[str, hlo.Instruction], named: Mapping[str, str | None]
) -> dict[str, str | None]:
  """The same; an instruction without a name joins its users or operands."""
  parts = dict(named)
  # Names of traced operations are paths; the compiler adds simple names.
  nameless = {
    name
    for name, item in body.items()
    if not parts[name] and "/" not in item.op_name
  }
  # In scheduled order, operands come before their users.
  for name in reversed(tuple(body)):
    for operand in body[name].operands:
      if operand in nameless and parts[name]:
        parts[operand] = parts[name]  # The first user is the last to come.
  for name in body:
    if name in nameless and not parts[name]:
      made = (parts.get(operand) for operand in body[name].operands)
      parts[name] = next(filter(None, made), None)
  return parts
