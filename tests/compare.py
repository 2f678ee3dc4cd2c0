# SPDX-License-Identifier: Apache-2.0
"""Compares arrays up to rounding."""

from typing import Any

import jax
import numpy as np


def error(found: Any, expected: Any) -> float:
  """Root mean square difference over the root mean square of `expected`."""
  found, expected = np.float64(found), np.float64(expected)
  return np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))


def trees(found: Any, expected: Any, tolerance: float) -> None:
  """Asserts equal leaves, up to a part of each one's largest number plus 1."""
  found, expected = map(jax.tree.leaves, (found, expected))
  assert len(found) == len(expected) > 0
  for a, b in zip(found, expected):
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    atol = tolerance * (1 + np.abs(b).max())
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)
