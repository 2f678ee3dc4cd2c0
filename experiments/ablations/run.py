# SPDX-License-Identifier: Apache-2.0
"""Measures what each part of depth attention contributes (Table 4).

  python -m experiments.ablations.run

See the README beside this file.
"""

import sys

from attnres_jax.sweep import cli
from experiments.pages import sweep

EXPERIMENT = sweep.experiment(__file__, __doc__)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
