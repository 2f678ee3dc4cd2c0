# SPDX-License-Identifier: Apache-2.0
"""Results with blocks of several sizes, also of the deep network."""

import functools

from experiments.block_size import config
from experiments.pages import readme
from experiments.pages import variants

_DEEP = functools.partial(variants.results, config.DEEP)
PUBLISHED = variants.published(
  __file__,
  config.STUDY,
  [readme.Part(_DEEP, name, name) for name in ("deep", "hot")],
)
