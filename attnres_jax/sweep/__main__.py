# SPDX-License-Identifier: Apache-2.0
r"""Trains any config with several values of its fields, and compares them.

  python -m attnres_jax.sweep --config=configs/lm.py:size=micro --seeds=3 \
    --sweep optim.peak_lr=1e-3,3e-3 --workdir=runs/rates \
    --sweep model.residual.name=prenorm,block_attnres

trains twelve runs, with report.html beside them. Without --sweep and --seeds,
it trains the sweep of a config file that defines one. Rerun the same command to
resume it, or with more seeds or values to add runs. A seed sets initial weights
and the order of the data, so that runs of one seed are pairs.
"""

from collections.abc import Sequence
import sys

from attnres_jax.sweep import cli


def _render(*sweep):
  from attnres_jax.sweep.pages import sweep_page  # There is something to draw.

  return sweep_page.render(*sweep)


EXPERIMENT = cli.Experiment(
  program="python -m attnres_jax.sweep",
  description=__doc__ or "",
  config=None,
  workdir=None,
  render=_render,
)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  return cli.main(EXPERIMENT, argv)


if __name__ == "__main__":
  sys.exit(main())
