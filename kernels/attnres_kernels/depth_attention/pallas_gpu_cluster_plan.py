# SPDX-License-Identifier: Apache-2.0
"""How a cluster of thread blocks divides up the work of depth attention.

Groups of eight tokens have one row per source and token, in windows of 64 rows,
of which the last overlaps the one before. Columns are divided among the blocks
of the cluster, and each share into chunks.
"""

import dataclasses
import math

import jax.numpy as jnp

from attnres_kernels import warpgroup

TOKENS = 8  # Of a group: rows of a tile of the matrix unit.
ROWS = 64  # Of a product; sources in windows of as many, the last overlaps.
COLUMNS = 64  # Of a chunk.
_PARTS = 8  # Thread blocks of a portable cluster, at most.
# Narrower rows would mostly wait for the exchange between blocks.
_WIDTH = 512
SHARED_OF_TWO = 113 * 2**10  # What leaves room for a second thread block.
# Shapes by name, and whether in tiles of bfloat16 (or rows of float32).
Arrays = dict[str, tuple[tuple[int, ...], bool]]


@dataclasses.dataclass(frozen=True)
class Plan:
  """How a cluster divides up the work.

  Attributes:
    queries: rounded up to a multiple of eight.
    slots: M.
    width: D.
    parts: thread blocks of a cluster.
    terms: of a query.
    backward: whether for the backward pass.
  """

  queries: int
  slots: int
  width: int
  parts: int
  terms: int
  backward: bool

  @property
  def tokens(self) -> int:
    """Of a group."""
    return TOKENS

  @property
  def columns(self) -> int:
    """Of a chunk."""
    return COLUMNS

  @property
  def chunks(self) -> int:
    """Chunks of columns of each block; the last may lie beyond the width."""
    return -(-self.width // (COLUMNS * self.parts))

  @property
  def tile(self) -> int:
    """Columns of a tile, which must divide the width."""
    return 64 if self.width % 64 == 0 else 16

  @property
  def spans(self) -> int:
    return self.queries // 8

  @property
  def rows(self) -> int:
    return max(ROWS, TOKENS * self.slots)

  @property
  def starts(self) -> tuple[int, ...]:
    """First rows of the windows."""
    last = self.rows - ROWS
    return (*range(0, last, ROWS), last)

  def place(self, slot: int) -> tuple[int, int]:
    """The window of a slot, and its first row there."""
    window = slot * TOKENS // ROWS
    return window, slot * TOKENS - self.starts[window]

  @property
  def streamed(self) -> bool:
    """Whether output gradients do not stay: backward, beyond eight queries."""
    return self.backward and self.spans > 1

  @property
  def query_rows(self) -> int:
    """Rows of the terms of the queries, or of both factors backward."""
    return ROWS if self.backward else self.terms * self.queries

  @property
  def scratch(self) -> Arrays:
    """Shapes in shared memory, and whether in tiles of bfloat16."""
    windows, chunks = len(self.starts), self.chunks
    if self.streamed:
      matrix = ROWS, ROWS
      return {
        "source": ((chunks, ROWS, COLUMNS), True),
        # Of eight queries each, in turns.
        "dout": ((2, ROWS, COLUMNS), True),
        "query": ((2, ROWS, COLUMNS), True),
        "weight": ((self.spans, 2, *matrix), True),
        "pull": ((self.spans, *matrix), True),
        "by_slot": ((ROWS, 8), False),
        "weights": ((8, ROWS), False),
        "pulls": ((ROWS, 8), False),
        "bend": ((ROWS,), False),
      }
    both: Arrays = {
      "source": ((chunks, self.rows, COLUMNS), True),
      "query": ((chunks, self.query_rows, COLUMNS), True),
      "stage": ((ROWS, COLUMNS), True),
      "by_slot": ((ROWS, 8), False),
      # Of weights: in a forward pass by query and token, else by source.
      "weight": ((windows, 2, ROWS, ROWS), True),
    }
    if not self.backward:
      forward: Arrays = {
        "slots": ((8, 8, TOKENS), False),
        "flat": ((8, ROWS), False),
      }
      return both | forward
    backward: Arrays = {
      "dout": ((chunks, ROWS, COLUMNS), True),
      "pull": ((windows, ROWS, ROWS), True),
      "weights": ((windows, 8, ROWS), False),
      "pulls": ((windows, ROWS, 8), False),
      "bend": ((windows, ROWS), False),
      "sums": ((chunks, COLUMNS, 8), False),
    }
    return both | backward

  @property
  def shared_bytes(self) -> int:
    """Of a thread block: each array from a multiple of a KiB on, barriers."""
    sizes = [
      math.prod(shape) * (2 if tiled else 4)
      for shape, tiled in self.scratch.values()
    ]
    return sum(-(-size // 1024) for size in sizes) * 1024 + 1024

  @property
  def exchanged_bytes(self) -> int:
    """Of a token: what the thread blocks write for each other."""
    columns = self.queries * (1 + self.backward) + 1
    rows = len(self.starts) * ROWS // TOKENS
    return 4 * self.parts * rows * columns


def plan(function, query_QD, sources, tokens, *more) -> Plan | None:
  """How to run on clusters, or None if that is not possible or worthwhile.

  Args:
    function: "forward" or "backward".
    query_QD: the queries.
    sources: separate ones or a bank.
    tokens: their number.
    *more: other arrays that must have the dtype of the sources.
  """
  queries, width = query_QD.shape
  backward = function == "backward"
  if (
    any(x.dtype != jnp.bfloat16 for x in (sources[0], *more))
    # One query needs few instructions, and most rows would be padding.
    or queries == 1
    or tokens % TOKENS
    or width % 16
    or width < _WIDTH
  ):
    return None
  rounded = -(-queries // 8) * 8
  for terms in (3, 2):
    for limit in (SHARED_OF_TWO, warpgroup.SHARED_BYTES):
      for parts in range(2, _PARTS + 1):
        one = Plan(rounded, len(sources), width, parts, terms, backward)
        # More windows, or sums, do not fit the registers.
        windows = 1 if one.streamed else 2
        if one.streamed and one.spans > 3:
          continue
        if one.shared_bytes <= limit and len(one.starts) <= windows:
          return one
  return None
