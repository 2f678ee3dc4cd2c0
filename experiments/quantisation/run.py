# SPDX-License-Identifier: Apache-2.0
"""Trains the networks whose weights and caches `losses.py` rounds.

  python -m experiments.quantisation.run

See the README beside this file.
"""

import sys

from attnres_jax.sweep import cli
from experiments.pages import readme
from experiments.pages import sweep
from experiments.quantisation import report

EXPERIMENT, PUBLISHED = sweep.experiment(
  __file__,
  __doc__,
  places=[
    readme.Place(report.networks),
    readme.Place(report.table, "rounding", "losses"),
  ],
)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
