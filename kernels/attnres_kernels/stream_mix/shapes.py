# SPDX-License-Identifier: Apache-2.0
"""Named shapes, for tests and benchmarks alike."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
  """M streams in some dtype, of T tokens and width D, with C logits."""

  name: str
  dtype: str
  tokens: int = 16384
  width: int = 2048
  count: int = 4
  columns: int = 24

  def __str__(self) -> str:
    sizes = self.count, self.tokens, self.width, self.columns
    return f"{self.name}({', '.join(map(str, sizes))}, {self.dtype})"


# mHC with four streams.
NAMED = tuple(Shape("mhc", dtype) for dtype in ("bfloat16", "float32"))
