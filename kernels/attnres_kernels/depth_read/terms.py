# SPDX-License-Identifier: Apache-2.0
"""Sources that are sums of several arrays, as the backends get them: flat."""

from collections.abc import Sequence
from typing import Any


def flatten(sources: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
  """All terms of all sources, and how many each source has."""
  groups = [x if isinstance(x, tuple) else (x,) for x in sources]
  return [term for group in groups for term in group], tuple(map(len, groups))


def grouped(
  terms: Sequence[Any], sizes: tuple[int, ...] | None
) -> list[tuple[Any, ...]]:
  """The terms of each source; without sizes, it has one."""
  if sizes is None:
    return [(term,) for term in terms]
  remaining = iter(terms)
  return [tuple(next(remaining) for _ in range(size)) for size in sizes]


def total(values: Sequence[Any]) -> Any:
  """The sum, in the order of the terms."""
  first, *others = values
  for value in others:
    first = first + value
  return first
