# SPDX-License-Identifier: Apache-2.0
"""Measures loss over compute for several residual schemes.

  python -m experiments.scaling_law.run --max_parallel=2
  python -m experiments.scaling_law.run status
  python -m experiments.scaling_law.run collect
  python -m experiments.publish scaling_law

See the README beside this file.
"""

from collections.abc import Sequence
import sys
from typing import Any

from etils import epath

from attnres_jax.sweep import cli


def render(folder: epath.Path, progress: Sequence[Any]) -> str:
  """The page; figures are imported once there is something to draw."""
  from experiments.scaling_law import report

  return report.render(folder, progress)


EXPERIMENT = cli.Experiment(
  program="python -m experiments.scaling_law.run",
  description=__doc__ or "",
  config="configs/scaling.py",
  workdir="runs/scaling",
  render=render,
)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
