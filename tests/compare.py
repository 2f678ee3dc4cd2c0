# SPDX-License-Identifier: Apache-2.0
"""Compares arrays up to rounding."""

from typing import Any

import jax
import numpy as np


def error(actual: Any, expected: Any) -> float:
  """Root mean square difference over the root mean square of `expected`."""
  actual, expected = np.float64(actual), np.float64(expected)
  return np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))


def trees(
  actual: Any, expected: Any, tolerance: float, plus: float = 1.0
) -> None:
  """Asserts equal leaves, up to a part of each one's largest number `plus`."""
  flat = jax.tree.leaves_with_path(actual)
  assert flat
  for (path, a), b in zip(flat, jax.tree.leaves(expected), strict=True):
    a, b, where = np.asarray(a), np.asarray(b), jax.tree_util.keystr(path)
    assert a.dtype == b.dtype, where
    atol = tolerance * (plus + np.abs(b).max())
    np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=where)
