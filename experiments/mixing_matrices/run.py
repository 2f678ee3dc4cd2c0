# SPDX-License-Identifier: Apache-2.0
"""Draws the depth mixing matrices of trained networks, as in Fig. 9.

  python -m experiments.mixing_matrices.run --runs=runs/ablations

See the README beside this file.
"""

import json
import pathlib
import sys

import numpy as np

from attnres_jax import analysis
from experiments import trained
from experiments.mixing_matrices import report
from experiments.pages import readme

# Relative singular values below this do not count.
_TOLERANCE = 1e-3


def measure(network: trained.Network) -> list[trained.Row]:
  """The matrix, averaged over tokens, and the rank of one token's."""
  inputs_BT = network.tokens_BT[:, :-1]
  matrix = analysis.mixing_matrix(network.model, inputs_BT)
  last_11 = inputs_BT[:1, :1]
  one = analysis.mixing_matrix(network.model, last_11, channel=0)
  return [
    {
      "rank": analysis.semiseparable_rank(one, _TOLERANCE),
      "matrix": json.dumps(np.round(matrix, 4).tolist()),
    }
  ]


LOOK = trained.Look(
  readme.Published(
    pathlib.Path(__file__).absolute().parent,
    [readme.Place(report.results)],
    {"matrices.svg": report.figure},
  ),
  report.VARIANTS,
  measure,
)
PUBLISHED = LOOK.published

if __name__ == "__main__":
  sys.exit(trained.command(LOOK))
