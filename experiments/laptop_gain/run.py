# SPDX-License-Identifier: Apache-2.0
"""Trains five networks, each at its own learning rate.

  python -m experiments.laptop_gain.run

See the README beside this file.
"""

import sys

from attnres_jax.sweep import cli
from experiments.laptop_gain import report
from experiments.pages import readme
from experiments.pages import sweep

EXPERIMENT, PUBLISHED = sweep.experiment(
  __file__,
  __doc__,
  places=[
    readme.Place(report.rates, "rates", "rates"),
    readme.Place(report.results),
    readme.Place(report.course, "course"),
    readme.Place(report.gain, "gain", document="../../README.md"),
  ],
)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
