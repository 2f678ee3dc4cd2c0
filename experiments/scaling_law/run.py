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
from experiments.pages import readme
from experiments.pages import sweep
from experiments.scaling_law import plans
from experiments.scaling_law import report

EXPERIMENT, PUBLISHED = sweep.experiment(
  __file__,
  __doc__,
  config="configs/scaling.py",
  workdir="runs/scaling",
  render=report.render,
  places=[
    readme.Place(report.results),
    readme.Place(report.learning_rates, "learning_rates", "learning_rates"),
    readme.Place(
      plans.table, "plans", "../../configs/plans", "../../docs/plan.md"
    ),
    readme.Place(
      plans.bought, "budgets", "../../configs/plans", "../../docs/launch.md"
    ),
  ],
  figures={"laws.svg": report.figure},
)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
