# SPDX-License-Identifier: Apache-2.0
"""Measures how much of a loss is noise, and where it comes from.

  python -m experiments.noise.run

See the README beside this file.
"""

import sys

from attnres_jax.sweep import cli
from experiments.noise import report
from experiments.pages import readme
from experiments.pages import sweep

EXPERIMENT, PUBLISHED = sweep.experiment(
  __file__,
  __doc__,
  places=[readme.Place(report.results)],
)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
