# SPDX-License-Identifier: Apache-2.0
"""Measures loss over compute for several residual schemes.

  python -m experiments.scaling_law.run --max_parallel=2
  python -m experiments.scaling_law.run status
  python -m experiments.scaling_law.run collect
  python -m experiments.publish scaling_law

See the README beside this file.
"""

import sys

from attnres_jax.sweep import cli
from experiments.pages import sweep

EXPERIMENT = sweep.experiment(
  __file__, __doc__, config="configs/scaling.py", workdir="runs/scaling"
)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
