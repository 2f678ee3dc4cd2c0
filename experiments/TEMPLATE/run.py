# SPDX-License-Identifier: Apache-2.0
"""Runs the sweep of config.py and reports the results; see the README."""

import sys

from attnres_jax.sweep import cli
from experiments.pages import sweep

EXPERIMENT = sweep.experiment(__file__, __doc__)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
