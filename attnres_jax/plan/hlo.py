# SPDX-License-Identifier: Apache-2.0
"""Reads a compiled TPU or GPU program: what it computes, moves and sends.

The compiler's own cost analysis counts the body of a loop once. Here every
instruction counts as often as it runs: trip counts are read from the conditions
of the loops, and trip counts of nested loops are multiplied. Where a condition
does not tell, a loop counts as one trip, or none if it is marked as usually
skipped (`attnres_jax.common.scopes`).
"""

from collections.abc import Iterator, Mapping, Sequence
import functools
import re

from attnres_jax.common import scopes
from attnres_jax.plan import gpu_products
from attnres_jax.plan import instruction as instruction_lib

Array = instruction_lib.Array
Instruction = instruction_lib.Instruction

# Operations that read as much of their first operand as they return.
_CUTS = ("slice", "dynamic-slice", "gather")
# Operations that write a part of their first operand: the number of the operand
# that they write.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
# Of an instruction whose result is its operand.
_ALIASED = "output_to_operand_aliasing={{}: (0, {})}"
_ALLOCATES = 'custom_call_target="AllocateBuffer"'
CONTROL = ("while", "conditional", "call")
# Not work: names, views, and ends of asynchronous operations, which are counted
# where they start.
_FREE = {
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while",
  "conditional", "call", "after-all", "partition-id", "opt-barrier",
}  # fmt: skip


class Program:
  """A compiled module, from `compiled.as_text()`.

  Attributes:
    computations: {computation: {instruction: its line}}, in scheduled order.
    fused: computations inside one instruction, whose values stay on the core.
    runs: how often each computation runs, and whether it is in a loop.
    entry: the computation that runs first.
    tiled: whether bytes are counted in whole tiles of memory, and operands
      that a kernel is given twice once.
  """

  def __init__(self, text: str, *, tiled: bool = False):
    self.computations: dict[str, dict[str, Instruction]] = {}
    self.tiled, self.entry = tiled, ""
    current: dict[str, Instruction] = {}
    name = ""
    for line in text.splitlines():
      head = re.match(r"(ENTRY )?(%[\w.\-]+) \(.*\{$", line)
      if head:
        name = head[2]
        current = self.computations.setdefault(name, {})
        self.entry = name if head[1] else self.entry
      elif line.startswith("  "):
        instruction = instruction_lib.parse(name, line, tiled)
        if instruction:
          current[instruction.name] = instruction

  def flops(self, start: str = "") -> float:
    """FLOPs of all matrix products, except those inside Pallas kernels.

    Of the computation `start`, executed once, instead of the whole program.
    """
    return sum(
      count * self.product_flops(instruction)
      for name, (count, _) in self.runs_from(start).items()
      for instruction in self.computations[name].values()
    )

  def product_flops(self, instruction: Instruction) -> float:
    """FLOPs of one execution of a matrix product; 0 for anything else."""
    computation, _ = instruction.place
    body = self.computations[computation]
    if instruction.op == "convolution":
      return instruction_lib.product_flops(instruction, body)
    return gpu_products.product_flops(instruction, body)

  def hbm_bytes(self, start: str = "") -> float:
    """Bytes of HBM that all instructions read and write; see `flops`."""
    return sum(count * nbytes for count, _, nbytes in self.instructions(start))

  def instructions(
    self, start: str = ""
  ) -> Iterator[tuple[float, Instruction, float]]:
    """(executions, instruction, bytes of memory per execution) of all work.

    A fusion is one instruction, and those inside are not listed. If it only
    slices an array or gathers from it, the results count; if it updates an
    array in place or scatters into it, the update counts.
    """
    for name, (count, _) in self.runs_from(start).items():
      if name not in self.fused:
        for instruction, nbytes in self.moved(name):
          yield count, instruction, nbytes

  def moved(self, name: str) -> Iterator[tuple[Instruction, float]]:
    """(instruction, bytes of memory) of all work of one computation."""
    body = self.computations[name]
    for instruction in body.values():
      if instruction.op in _FREE or instruction.op.endswith("-done"):
        continue
      if instruction.ends_collective:
        continue  # It was counted with its first piece.
      if _ALLOCATES in instruction.attributes:
        continue  # Nothing is written: what is in there is not defined.
      yield instruction, self._nbytes(instruction, body)

  def largest(self, count: int) -> list[tuple[Array, str]]:
    """(array, traced operation) of the largest arrays.

    One for each shape and operation.
    """
    arrays = {
      (array, instruction.source())
      for _, instruction, _ in self.instructions()
      if not instruction.op.endswith(("-start", "-update"))
      for array in instruction.made
      if array.in_hbm
    }
    return sorted(arrays, key=lambda pair: (-pair[0].nbytes, pair[1]))[:count]

  def busiest(self, count: int) -> list[tuple[float, float, str, str]]:
    """(bytes of memory, runs, array, traced operation) of the most traffic.

    Bytes are summed over all runs. Instructions of one operation whose largest
    results look the same are combined. If the traced operation is unknown, the
    compiler's is given.
    """
    moved: dict[tuple[str, str], list[float]] = {}
    for runs, instruction, nbytes in self.instructions():
      largest = max(instruction.made, key=lambda a: a.nbytes, default="")
      key = str(largest), instruction.source() or instruction.op
      sums = moved.setdefault(key, [0.0, 0.0])
      sums[0] += runs * nbytes
      sums[1] += runs
    rows = [(sums[0], sums[1], *key) for key, sums in moved.items()]
    return sorted(rows, key=lambda row: (-row[0], *row[2:]))[:count]

  def _nbytes(
    self, instruction: Instruction, body: Mapping[str, Instruction]
  ) -> float:
    """Bytes read and written by one execution of an instruction."""
    names: Sequence[str] = instruction.operands
    if self.tiled and instruction.op == "custom-call":
      names = tuple(dict.fromkeys(names))  # A block and its halo.
    operands = [body[name].arrays if name in body else () for name in names]
    results = list(instruction.arrays)
    if instruction.op.endswith(("-start", "-update")):
      # Its results include the operands, for instructions that wait for them.
      for array in (array for arrays in operands for array in arrays):
        if array in results:
          results.remove(array)
    read: Mapping[int, float] = {}
    written: Mapping[int, float] = {}
    if instruction.op.removesuffix("-start") == "fusion":
      read, written = self._parts(instruction)
      for result, operand in instruction.carried.items():
        written[result] = 0.0
        if operand is not None:
          read[operand] = 0.0
    elif instruction.op.removesuffix("-start") in _CUTS:
      read = {0: max(a.nbytes for a in results)}
    elif instruction.op in _UPDATES:
      new = sum(a.nbytes for a in operands[_UPDATES[instruction.op]])
      read = {0: self._adds(instruction) * new}
      written = {0: new}
    total = 0.0
    for i, arrays in enumerate(operands):
      in_hbm = [a.nbytes for a in arrays if a.in_hbm]
      total += read.get(i, sum(in_hbm)) if in_hbm else 0
    for i, array in enumerate(results):
      total += written.get(i, array.nbytes) if array.in_hbm else 0
    return total

  def _parts(
    self, fusion: Instruction
  ) -> tuple[dict[int, float], dict[int, float]]:
    """The parts of arrays that a fusion slices or updates in place.

    Returns:
      Bytes by operand number, and by result number; arrays that are used
      completely are left out.
    """
    ((_, name),) = (pair for pair in fusion.called() if pair[0] == "calls")
    inside = self.computations[name]

    def behind(name: str) -> Instruction:
      while self._is_view(inside[name]):
        (name,) = inside[name].operands
      return inside[name]

    read: dict[int, float] = {}
    complete = set()
    for user in inside.values():
      if self._is_view(user):
        continue
      nested = self._parts(user)[0] if user.op == "fusion" else {}
      if user.op in _CUTS:
        nested = {0: sum(a.nbytes for a in user.arrays)}
      elif user.op in _UPDATES:
        # The updated array is not read, except where a scatter adds to it.
        new = inside[user.operands[_UPDATES[user.op]]]
        nested = {0: self._adds(user) * sum(a.nbytes for a in new.arrays)}
      for i, operand in enumerate(user.operands):
        source = behind(operand)
        if source.op == "parameter" and i in nested:
          number = instruction_lib.number(source)
          read[number] = read.get(number, 0) + nested[i]
        elif source.op == "parameter":
          complete.add(instruction_lib.number(source))
    root = list(inside.values())[-1]
    ends = root.operands if root.op == "tuple" else (root.name,)
    written = {}
    for i, end in enumerate(map(behind, ends)):
      if end.op in _UPDATES:
        target = behind(end.operands[0])
        if target.op == "parameter" or _ALLOCATES in target.attributes:
          update = inside[end.operands[_UPDATES[end.op]]]
          written[i] = sum(a.nbytes for a in update.arrays)
      elif end.op == "fusion" and 0 in (nested := self._parts(end)[1]):
        written[i] = nested[0]
    return {i: n for i, n in read.items() if i not in complete}, written

  def _adds(self, instruction: Instruction) -> bool:
    """Whether it is a scatter whose result depends on what was there."""
    if instruction.op != "scatter":
      return False
    ((_, name),) = (p for p in instruction.called() if p[0] == "to_apply")
    return list(self.computations[name].values())[-1].op != "parameter"

  def _is_view(self, instruction: Instruction) -> bool:
    """Whether it is its operand, perhaps in other tiles, within a fusion."""
    if instruction.op == "bitcast":
      return True
    if instruction.op != "fusion" or _ALIASED not in instruction.attributes:
      return False
    ((_, name),) = instruction.called()
    ops = [inner.op for inner in self.computations[name].values()]
    return ops == ["parameter", "copy"]

  def inside(self, instruction: Instruction) -> Iterator[Instruction]:
    """The instructions that are fused into one."""
    for _, called in instruction.called():
      if called in self.fused:
        for inner in self.computations[called].values():
          yield inner
          yield from self.inside(inner)

  @functools.cached_property
  def fused(self) -> set[str]:
    """Computations inside one instruction, whose values stay on the core."""
    return {
      called
      for computation in self.computations.values()
      for instruction in computation.values()
      if instruction.op not in CONTROL
      for _, called in instruction.called()
    }

  @functools.cached_property
  def runs(self) -> Mapping[str, tuple[float, bool]]:
    """How often each computation runs, and whether it is in a loop.

    One branch of a conditional runs, and the program does not say which, so all
    branches get equal weight. Of loops whose trip counts depend on data, names
    may state the mean (`scopes.mean_trips`).
    """
    return self.runs_from(self.entry)

  def runs_from(self, start: str = "") -> Mapping[str, tuple[float, bool]]:
    """`runs` of a computation that is executed once; "" is the program."""
    if not start:
      return self.runs
    runs: dict[str, tuple[float, bool]] = {}

    def visit(name: str, count: float, in_loop: bool) -> None:
      before, was_in_loop = runs.get(name, (0, False))
      runs[name] = before + count, was_in_loop or in_loop
      for instruction in self.computations[name].values():
        called = dict(instruction.called())
        if instruction.op == "while":
          trips = scopes.mean_trips_of_name(instruction.op_name)
          if trips is None:
            trips = self.trips(instruction, called["condition"])
          visit(called["body"], count * trips, True)
          continue
        inner = [called for _, called in instruction.called()]
        share = len(inner) if instruction.op == "conditional" else 1
        for callee in inner:
          visit(callee, count / share, in_loop)

    visit(start, 1, False)
    return runs

  def trips(self, loop: Instruction, condition: str) -> int:
    """What the compiler says, or the largest constant in the condition."""
    count = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if count:
      return int(count[1])
    constants = [
      int(match[1])
      for instruction in self.computations[condition].values()
      if instruction.op == "constant"
      and (match := re.match(r"(\d+)\)", instruction.attributes))
    ]
    return max(constants, default=1)
