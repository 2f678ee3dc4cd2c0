# SPDX-License-Identifier: Apache-2.0
"""Trains Block AttnRes with blocks of several sizes (Fig. 6).

  python -m experiments.block_size.run

See the README beside this file.
"""

import sys

from attnres_jax.sweep import cli
from experiments.pages import sweep

EXPERIMENT = sweep.experiment(__file__, __doc__)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
