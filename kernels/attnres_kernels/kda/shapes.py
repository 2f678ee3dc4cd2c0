# SPDX-License-Identifier: Apache-2.0
"""Named shapes, for tests and benchmarks alike."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
  """B sequences of T tokens, H heads, keys of width K, values of width V."""

  name: str
  batch: int
  tokens: int
  heads: int
  key: int
  value: int

  def __str__(self) -> str:
    sizes = (self.batch, self.tokens, self.heads, self.key, self.value)
    return f"{self.name}({', '.join(map(str, sizes))})"


# The 48B model, and the smallest of Table 2 of the paper.
KIMI_48B = Shape("48b", 1, 8192, 32, 128, 128)
TABLE_2 = Shape("table2", 4, 4096, 12, 128, 128)
NAMED = (KIMI_48B, TABLE_2)
