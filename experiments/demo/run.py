# SPDX-License-Identifier: Apache-2.0
"""Trains four residual schemes side by side on real text and reports.

  make demo
  python -m experiments.demo.run

The schemes see the same data in the same order, start from the same weights and
share every hyper-parameter; the seeds of a scheme are trained as one program.
The text is one that every machine has: the standard library of the running
Python. Rerun the same command to resume an interrupted demo.

Writes report.html, one file that works offline, to --workdir; it follows while
the demo trains.
"""

import sys

from attnres_jax.sweep import cli
from experiments.pages import sweep

EXPERIMENT = sweep.experiment(
  __file__, __doc__, launcher="together", refresh_seconds=20.0
)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
