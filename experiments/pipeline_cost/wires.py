# SPDX-License-Identifier: Apache-2.0
"""What a compiled program sends along the ring, from its text."""

import re
from typing import NamedTuple

from attnres_jax.aot import hlo


class Sent(NamedTuple):
  """The transfers of a pipeline's loop, for all devices together.

  Attributes:
    ticks: how often the loop runs.
    forward: vectors per tick, from a rank to the next.
    backward: vectors per tick, to the previous rank.
    nbytes: of a step.
    vector_bytes: sizes of the vectors that are sent.
  """

  ticks: int
  forward: int
  backward: int
  nbytes: int
  vector_bytes: frozenset[int]


def read(text: str, num_ranks: int, num_copies: int = 1) -> Sent:
  """Counts every collective-permute, weighted by how often it runs.

  Args:
    text: of a compiled program.
    num_ranks: P, above 2; in a ring of two, both directions are the same.
    num_copies: devices that share a rank; their axes come after `stage`.

  Raises:
    ValueError: the program permutes outside of its loop, or not along the ring.
  """
  found, directions = [], {1: 0, num_ranks - 1: 0}
  for count, instruction, _ in hlo.Program(text).instructions():
    if instruction.op.removesuffix("-start") != "collective-permute":
      continue
    pairs = re.search(
      r"source_target_pairs=\{(\{[\d,{}]*\})\}", instruction.attributes
    )
    if pairs is None:
      raise ValueError(f"{instruction.name} has no pairs of devices")
    ends = re.findall(r"\{(\d+),(\d+)\}", pairs[1])
    steps = {
      (int(b) // num_copies - int(a) // num_copies) % num_ranks for a, b in ends
    }
    if len(steps) != 1 or not steps <= directions.keys():
      raise ValueError(f"{instruction.name} is not along a ring: {pairs[1]}")
    directions[steps.pop()] += len(ends)
    found.append((count, len(ends), int(instruction.arrays[0].nbytes)))
  counts = {count for count, _, _ in found}
  if len(counts) != 1:
    raise ValueError(f"expected one loop with permutes, found {sorted(counts)}")
  return Sent(
    ticks=counts.pop(),
    forward=directions[1],
    backward=directions[num_ranks - 1],
    nbytes=sum(count * pairs * nbytes for count, pairs, nbytes in found),
    vector_bytes=frozenset(nbytes for _, _, nbytes in found),
  )
