# SPDX-License-Identifier: Apache-2.0
"""Named shapes, for tests and benchmarks alike."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
  """Q queries over M sources of T tokens and width D, with H heads."""

  name: str
  queries: int
  sources: int
  tokens: int
  width: int
  heads: int = 1
  rank: int | None = None

  def __str__(self) -> str:
    sizes = (self.queries, self.sources, self.tokens, self.width)
    more = [f"H={self.heads}"] * (self.heads > 1)
    if self.rank is not None:
      more.append(f"R={self.rank}")
    return f"{self.name}({', '.join([*map(str, sizes), *more])})"

  @property
  def options(self) -> dict[str, int]:
    """Options of the operators that are not the defaults."""
    options = {"heads": self.heads} if self.heads > 1 else {}
    return options | ({} if self.rank is None else {"rank": self.rank})


# The 48B model of the paper: 6 sublayers per block, up to 9 blocks before.
BLOCK_48B = tuple(Shape("48b", 6, m, 8192, 2304) for m in range(1, 10))
# Table 2 of the paper, one of its odd widths.
TABLE_2 = tuple(Shape("table2", 4, m, 8192, 1168) for m in range(1, 9))
WIDE = (Shape("wide", 16, 8, 8192, 8192),)
KIMI_K3 = tuple(Shape("kimi_k3", 24, m, 8192, 7168) for m in range(1, 9))
DECODE = tuple(
  Shape("decode", 24, 8, tokens, 7168) for tokens in (1, 8, 32, 128)
)
# Full AttnRes, scheduled in blocks of eight sublayers.
FULL = tuple(Shape("full", 8, m, 4096, 2304) for m in range(8, 57, 8))

_FAMILIES = (BLOCK_48B, TABLE_2, WIDE, KIMI_K3, DECODE, FULL)
NAMED = tuple(shape for family in _FAMILIES for shape in family)
# Both ends and the middle of each family, to keep the table readable.
TABLE = tuple(
  shape
  for family in _FAMILIES
  for shape in dict.fromkeys((family[0], family[len(family) // 2], family[-1]))
)
# Heads over depth as slices of 128, of 32 and of 144 columns; low-rank keys.
HEADS = (
  Shape("heads", 4, 5, 8192, 2048),
  Shape("heads", 4, 5, 8192, 2048, heads=16),
  Shape("heads", 4, 5, 8192, 2048, heads=64),
  Shape("heads", 6, 9, 8192, 2304, heads=16),
  Shape("heads", 4, 5, 8192, 2048, rank=64),
)
# The first, a middle and the last block of training steps with 3 and with 4
# sublayers per block.
STEP = tuple(
  Shape("step", queries, m, 8192, width)
  for queries, width in ((3, 1024), (4, 2048))
  for m in (1, 4, 8)
)
# What another JAX project has timed on a v4: blocks of eight sublayers, before
# which 0, 4 and 8 blocks are complete.
PEER = tuple(Shape("peer", 8, m, 16_384, 1536) for m in (1, 5, 9))
MERGE_PEER = (Shape("merge_peer", 1, 1, 16_384, 1536),)
MERGE_HEADS = tuple(
  Shape("merge_heads", 1, 1, 8192, s.width, s.heads, s.rank) for s in HEADS
)
MERGE = tuple(Shape("merge", 1, 1, 8192, width) for width in (1168, 2304, 8192))
# A read of Full AttnRes within its segment: the mixture and seven values.
MERGE_SEVERAL = tuple(
  Shape("several", 1, 7, 8192, width) for width in (1024, 2304)
)
# The other widths of Table 2, and the extremes of each axis.
ODD = tuple(
  Shape("odd", 4, 3, 96, width) for width in (896, 960, 1024, 1264)
) + (
  Shape("many_sources", 2, 130, 64, 1024),
  Shape("many_queries", 64, 3, 64, 1024),
  Shape("ragged", 5, 3, 1000, 960),
  Shape("one_token", 3, 4, 1, 8192),
)
