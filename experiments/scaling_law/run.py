# SPDX-License-Identifier: Apache-2.0
"""Runs the sweep of configs/scaling.py, and says what came out.

  python -m experiments.scaling_law.run --max_parallel=2
  python -m experiments.scaling_law.run status
  python -m experiments.scaling_law.run collect

See the README beside this file.
"""

import sys

from attnres_jax.sweep import cli
from experiments.scaling_law import report

EXPERIMENT = cli.Experiment(
  program="python -m experiments.scaling_law.run",
  description="Loss over compute for several residual schemes.",
  config="configs/scaling.py",
  workdir="runs/scaling",
  render=report.render,
)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
