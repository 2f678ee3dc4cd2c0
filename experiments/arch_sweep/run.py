# SPDX-License-Identifier: Apache-2.0
"""Runs the sweep of configs/arch_sweep.py, and says what came out.

  python -m experiments.arch_sweep.run --max_parallel=2
  python -m experiments.arch_sweep.run status

See the README beside this file.
"""

import sys

from attnres_jax.sweep import cli
from experiments.arch_sweep import report

EXPERIMENT = cli.Experiment(
  program="python -m experiments.arch_sweep.run",
  description="Loss over the shape of the network, for two residual schemes.",
  config="configs/arch_sweep.py",
  workdir="runs/arch_sweep",
  render=report.render,
)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
