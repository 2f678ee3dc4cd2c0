# SPDX-License-Identifier: Apache-2.0
"""Trains four networks at several sizes, each at its own learning rate.

  python -m experiments.gain_by_size.run --launcher=together

See the README beside this file.
"""

import sys

from attnres_jax.sweep import cli
from experiments.gain_by_size import report
from experiments.pages import readme
from experiments.pages import sweep

EXPERIMENT, PUBLISHED = sweep.experiment(
  __file__,
  __doc__,
  places=[
    readme.Place(report.rates, "rates", "rates"),
    readme.Place(report.results),
    readme.Place(report.answer, "answer"),
  ],
  figures={"gain.svg": report.figure},
)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
