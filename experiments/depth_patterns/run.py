# SPDX-License-Identifier: Apache-2.0
"""Measures the patterns of depth attention in trained networks (Fig. 8).

  python -m experiments.depth_patterns.run --runs=runs/ablations

See the README beside this file.
"""

import json
import pathlib
import sys
from typing import Any

import numpy as np

from attnres_jax import analysis
from experiments import trained
from experiments.depth_patterns import report
from experiments.pages import readme

_ARRAYS = (
  "attention", "mlp", "output", "attention_entropy", "mlp_entropy",
  "output_entropy",
)  # fmt: skip


def measure(network: trained.Network) -> list[trained.Row]:
  """One row, with arrays as JSON: weights, and what removals cost."""
  inputs_BT = network.tokens_BT[:, :-1]
  weights = analysis.depth_weights(network.model, inputs_BT)
  removal = analysis.source_removal(network.model, network.tokens_BT)
  return [
    {name: _listed(getattr(weights, name)) for name in _ARRAYS}
    | {
      "columns": json.dumps(weights.columns),
      "output_columns": json.dumps(weights.output_columns),
      "loss": f"{removal.loss:.5f}",
      "importance": _listed(removal.importance, 6),
      "read_weights": _listed(removal.weights, 6),
    }
  ]


def _listed(values: Any, digits: int = 5) -> str:
  """NaN becomes null, as JSON has no other name for it."""
  array = np.round(np.asarray(values, np.float64), digits)
  return json.dumps(array.tolist()).replace("NaN", "null")


LOOK = trained.Look(
  readme.Published(
    pathlib.Path(__file__).absolute().parent,
    [readme.Place(report.results)],
    {
      "weights.svg": report.heatmaps,
      "importance.svg": report.importances,
    },
  ),
  report.VARIANTS,
  measure,
)
PUBLISHED = LOOK.published

if __name__ == "__main__":
  sys.exit(trained.command(LOOK))
