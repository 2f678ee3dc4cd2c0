# SPDX-License-Identifier: Apache-2.0
"""Trains Block AttnRes with blocks of several sizes (Fig. 6).

  python -m experiments.block_size.run

See the README beside this file.
"""

import sys

from attnres_jax.sweep import cli
from experiments.block_size import config
from experiments.block_size import report
from experiments.pages import variants

EXPERIMENT, PUBLISHED = variants.experiment(
  __file__, __doc__, config.STUDY, report.figure
)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
