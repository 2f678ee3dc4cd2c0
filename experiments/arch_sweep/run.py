# SPDX-License-Identifier: Apache-2.0
"""Measures loss over network shape for two residual schemes.

  python -m experiments.arch_sweep.run --max_parallel=2
  python -m experiments.arch_sweep.run status
  python -m experiments.publish arch_sweep

See the README beside this file.
"""

import sys

from attnres_jax.sweep import cli
from experiments.pages import sweep

EXPERIMENT = sweep.experiment(__file__, __doc__, config="configs/arch_sweep.py")

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
