# SPDX-License-Identifier: Apache-2.0
"""Trains Block AttnRes with blocks of several sizes (Fig. 6).

  python -m experiments.block_size.run

See the README beside this file.
"""

import functools
import sys

from attnres_jax.sweep import cli
from experiments.block_size import config
from experiments.pages import readme
from experiments.pages import variants

_DEEP = [
  readme.Place(functools.partial(variants.results, config.DEEP), name, name)
  for name in ("deep", "hot")
]
EXPERIMENT, PUBLISHED = variants.experiment(
  __file__, __doc__, config.STUDY, places=_DEEP
)

if __name__ == "__main__":
  sys.exit(cli.main(EXPERIMENT))
