# SPDX-License-Identifier: Apache-2.0
"""Measures what each part of depth attention contributes (Table 4).

  python -m experiments.ablations.run

See the README beside this file.
"""

import functools
import sys

from attnres_jax.sweep import cli
from experiments.ablations import config
from experiments.pages import planned
from experiments.pages import readme
from experiments.pages import variants

_PLANS = readme.Place(
  functools.partial(planned.of_study, config.STUDY),
  "plans",
  "../../configs/plans",
)
EXPERIMENT, PUBLISHED = variants.experiment(
  __file__, __doc__, config.STUDY, places=[_PLANS]
)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
