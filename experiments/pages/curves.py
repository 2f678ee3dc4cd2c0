# SPDX-License-Identifier: Apache-2.0
"""Losses along a run, ready to be drawn."""

from collections.abc import Sequence

import numpy as np


def smooth(values: Sequence[float], share: float = 0.05) -> np.ndarray:
  """Mean over the last 5 % of the run (fewer at its start)."""
  width = max(1, round(share * len(values)))
  total = np.concatenate([[0.0], np.cumsum(values)])
  stop = np.arange(1, len(values) + 1)
  start = np.maximum(0, stop - width)
  return (total[stop] - total[start]) / (stop - start)
