# SPDX-License-Identifier: Apache-2.0
"""Trains every residual scheme in pairs with PreNorm.

  python -m experiments.residual_zoo.train

See the README beside this file.
"""

import sys

from attnres_jax.sweep import cli
from experiments.pages import sweep

EXPERIMENT = sweep.experiment(__file__, __doc__)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
