# SPDX-License-Identifier: Apache-2.0
"""Sublayers on ranks, and what each boundary must carry (section 4.1, Fig. 3).

P ranks with V virtual stages each have C = P * V chunks; chunk c runs on rank c
mod P as its virtual stage c div P. A sublayer reads every block completed
before it, so a rank needs the blocks b_0 .. b_{k(c) - 1} (b_0 is the embedding)
when it starts chunk c and, if a block is open, its partial sum. How much of
that has to be sent depends on what the receiver keeps from its earlier chunks:

  naive    nothing: the whole history crosses every boundary (Eq. 7);
  cached   what it received before: the paper's cross-stage cache (Eq. 8);
  minimum also what it computed itself. No rule sends less: every block is sent
           exactly once to every other rank that still has to read it.

The backward pass is the transpose: the gradients of the same blocks (and of the
partial sum) cross the same boundaries in the other direction, at the same cost.

Vectors are counted per microbatch, in units of one [tokens, width] activation.
"""

from collections.abc import Sequence
import dataclasses
import functools

from attnres_jax import config as config_lib
from attnres_jax.config import errors
from attnres_jax.config import fields

RULES = ("naive", "cached", "minimum")


@dataclasses.dataclass(frozen=True)
class Layout:
  """Which sublayers form each chunk, and where the blocks end.

  Attributes:
    num_ranks: P, pipeline stages that are devices (or groups of devices).
    num_virtual_stages: V, chunks per rank.
    sublayers_per_chunk: one number for all chunks, or one per chunk.
    block_size: S, sublayers per block, aligned with the chunks or not. None
      for schemes that keep no blocks: one running state crosses each boundary.
    stream: whether one also crosses boundaries where no block is open.
  """

  num_ranks: int
  num_virtual_stages: int
  sublayers_per_chunk: int | tuple[int, ...]
  block_size: int | None = None
  stream: bool = False

  def __post_init__(self):
    for name in ("num_ranks", "num_virtual_stages"):
      fields.accept(name, getattr(self, name), fields.Size)
    fields.accept("block_size", self.block_size, fields.Size | None)
    sizes = self.sublayers_per_chunk
    if not isinstance(sizes, Sequence):
      fields.accept("sublayers_per_chunk", sizes, fields.Size)
      return
    fields.accept("sublayers_per_chunk", sizes, tuple[fields.Size, ...])
    object.__setattr__(self, "sublayers_per_chunk", tuple(sizes))
    if len(sizes) != self.num_chunks:
      config_lib.fail_argument(
        "sublayers_per_chunk",
        sizes,
        f"one number per chunk, {self.num_chunks} of them",
      )

  @property
  def num_chunks(self) -> int:
    return self.num_ranks * self.num_virtual_stages

  @property
  def num_sublayers(self) -> int:
    return self.ends[-1]

  @property
  def num_blocks(self) -> int:
    """N, not counting the embedding; 0 for schemes that keep no blocks."""
    if self.block_size is None:
      return 0
    return -(-self.num_sublayers // self.block_size)

  @functools.cached_property
  def ends(self) -> tuple[int, ...]:
    """Number of sublayers that have run after each chunk."""
    sizes = self.sublayers_per_chunk
    if not isinstance(sizes, tuple):
      sizes = (sizes,) * self.num_chunks
    return tuple(sum(sizes[: c + 1]) for c in range(self.num_chunks))

  def rank(self, chunk: int) -> int:
    return chunk % self.num_ranks

  def virtual_stage(self, chunk: int) -> int:
    return chunk // self.num_ranks

  def chunks(self, rank: int) -> range:
    """The chunks of a rank, in the order in which they run."""
    return range(rank, self.num_chunks, self.num_ranks)

  def complete(self, chunk: int) -> int:
    """k(c): representations complete when chunk c starts; C for the end.

    The embedding counts, and a shorter last block is complete at the end.
    """
    if self.block_size is None:
      return 0
    if chunk == 0:
      return 1
    end = self.ends[chunk - 1]
    if end == self.num_sublayers:
      return 1 + self.num_blocks
    return 1 + end // self.block_size

  def produced(self, chunk: int) -> range:
    """The blocks that complete in a chunk; the embedding belongs to chunk 0."""
    start = self.complete(chunk) if chunk else 0
    return range(start, self.complete(chunk + 1))

  def held(self, chunk: int, rule: str) -> frozenset[int]:
    """Blocks whose gradients are being accumulated when a backward starts.

    Later chunks of the same rank have read them and have not sent them away.
    """
    held: set[int] = set()
    for later in reversed(self.chunks(self.rank(chunk))):
      if later == chunk:
        break
      held.update(self.window(later + 1, rule), self.reads(later))
      held.difference_update(self.window(later, rule), self.produced(later))
    return frozenset(held)

  def has_partial(self, chunk: int) -> bool:
    """Whether a running sum enters the chunk."""
    if chunk == 0:
      return False
    if self.block_size is None or self.stream:
      return True
    return self.ends[chunk - 1] % self.block_size != 0

  def window(self, chunk: int, rule: str) -> range:
    """The blocks that must be sent to the rank of a chunk when it starts.

    With one rank nothing is sent, under any rule; nor is anything at the end.
    """
    errors.check_in("rule", rule, RULES)
    if chunk in (0, self.num_chunks) or self.num_ranks == 1:
      return range(0)
    before = chunk - self.num_ranks
    if rule == "naive" or before < 0:
      start = 0
    elif rule == "cached":
      start = self.complete(before)
    else:
      start = self.complete(before + 1)
    return range(start, self.complete(chunk))

  def reads(self, chunk: int) -> range:
    """The blocks that a chunk attends to and has not computed itself."""
    return range(self.complete(chunk) if chunk else 0)

  def link_vectors(self, rule: str) -> tuple[int, ...]:
    """The most block vectors over the link into each rank, for any chunk.

    A program that runs all ranks in lockstep sends this much over a link at
    every tick. With V = 1 that is exactly what is needed.
    """
    return tuple(
      max(len(self.window(chunk, rule)) for chunk in self.chunks(rank))
      for rank in range(self.num_ranks)
    )

  def link_partials(self) -> tuple[bool, ...]:
    """Whether the link into each rank carries a running sum for any chunk."""
    return tuple(
      self.num_ranks > 1 and any(map(self.has_partial, self.chunks(rank)))
      for rank in range(self.num_ranks)
    )

  def total_vectors(self, rule: str, *, embedding: bool = True) -> int:
    """The number of block vectors sent per microbatch, without partial sums.

    The paper's closed forms leave out b_0, the embedding.
    """
    return sum(
      embedding or block > 0
      for chunk in range(self.num_chunks)
      for block in self.window(chunk, rule)
    )


def split_sublayers(num_sublayers: int, num_chunks: int) -> tuple[int, ...]:
  """Distributes L sublayers over C chunks as evenly as possible.

  Raises:
    ValueError: a chunk would be empty.
  """
  fields.accept("num_sublayers", num_sublayers, fields.Size)
  fields.accept("num_chunks", num_chunks, fields.Size)
  if num_chunks > num_sublayers:
    config_lib.fail_argument(
      "num_chunks",
      num_chunks,
      f"at most {num_sublayers}, so that none of the chunks is empty",
    )
  ends = [c * num_sublayers // num_chunks for c in range(num_chunks + 1)]
  return tuple(end - start for start, end in zip(ends[:-1], ends[1:]))


def naive_total(
  num_ranks: int, num_virtual_stages: int, blocks: float
) -> float:
  """Eq. 7: C (C - 1) / 2 times `blocks`, the blocks that a chunk completes.

  Like the other two closed forms, it leaves out the embedding and assumes that
  blocks complete at an even pace. If a block spans several chunks, that
  overestimates what is sent; `Layout.total_vectors` counts exactly.
  """
  chunks = num_ranks * num_virtual_stages
  return chunks * (chunks - 1) // 2 * blocks


def cached_total(
  num_ranks: int, num_virtual_stages: int, blocks: float
) -> float:
  """Eq. 8: P (P - 1) / 2 + (V - 1) P^2, times the blocks of a chunk."""
  first = num_ranks * (num_ranks - 1) // 2
  return (first + (num_virtual_stages - 1) * num_ranks**2) * blocks


def minimum_total(
  num_ranks: int, num_virtual_stages: int, blocks: float
) -> float:
  """P (P - 1) (V - 1/2), times the blocks of a chunk."""
  pairs = num_ranks * (num_ranks - 1)
  return pairs * (2 * num_virtual_stages - 1) // 2 * blocks
