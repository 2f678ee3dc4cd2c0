# SPDX-License-Identifier: Apache-2.0
"""Compares arrays up to rounding."""

from typing import Any

import jax
import numpy as np


def error(actual: Any, expected: Any) -> float:
  """Root mean square difference over the root mean square of `expected`."""
  actual, expected = np.float64(actual), np.float64(expected)
  return np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))


def trees(actual: Any, expected: Any, tolerance: float) -> None:
  """Asserts equal leaves, up to a part of each one's largest number plus 1."""
  actual, expected = map(jax.tree.leaves, (actual, expected))
  assert len(actual) == len(expected) > 0
  for a, b in zip(actual, expected):
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    atol = tolerance * (1 + np.abs(b).max())
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)
