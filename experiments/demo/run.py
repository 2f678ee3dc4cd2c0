# SPDX-License-Identifier: Apache-2.0
"""Trains four residual schemes side by side on real text and reports.

  make demo
  python -m experiments.demo.run

The schemes see the same data in the same order, start from the same weights and
share every hyper-parameter. PreNorm also runs for a fourth and half of the
steps, which gives the effective speed-ups of the others. The text is one that
every machine has: the standard library of the running Python. Rerun the same
command to resume an interrupted demo; finished runs are not repeated.

Writes report.html, one file that works offline, to --workdir.
"""

import sys

from attnres_jax.sweep import cli
from experiments.demo import config
from experiments.demo import report
from experiments.pages import variants

EXPERIMENT, PUBLISHED = variants.experiment(
  __file__, __doc__, config.STUDY, render=report.render
)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
