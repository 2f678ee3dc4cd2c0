# SPDX-License-Identifier: Apache-2.0
"""Trains Block AttnRes with several softmaxes per read.

  python -m experiments.depth_heads.run

See the README beside this file.
"""

import sys

from attnres_jax.sweep import cli
from experiments.depth_heads import config
from experiments.depth_heads import report
from experiments.pages import readme
from experiments.pages import variants

EXPERIMENT, PUBLISHED = variants.experiment(
  __file__,
  __doc__,
  config.STUDY,
  places=[readme.Place(report.contrasts, "contrasts")],
)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
