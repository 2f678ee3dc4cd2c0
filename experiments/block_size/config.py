# SPDX-License-Identifier: Apache-2.0
"""Block AttnRes with blocks of S sublayers; see `experiments.variants`.

The paper has 32 sublayers, as has `scale=deep`; the laptop's network has 16, so
that S = 16 is one block there. With S = 1 every sublayer is a block, which is
Full AttnRes.
"""

import dataclasses

from experiments import variants
from experiments.ablations import config as ablations

# S -> loss in the paper's Fig. 6, as far as its text says; it gives no numbers
# for 16 and 32, but a range.
_PUBLISHED = {1: 1.737, 2: 1.746, 4: 1.746, 8: 1.746}
# Names of those that are rows of Table 4.
_SHARED = {1: "full", 4: "block"}


def _name(size: int) -> str:
  return _SHARED.get(size, f"size{size}")


def _variant(size: int) -> variants.Variant:
  if size in _SHARED:
    return ablations.STUDY.variants[_SHARED[size]].labelled(f"S = {size}")
  return variants.Variant(
    f"S = {size}",
    "block_attnres",
    {"model.residual.block_size": size},
    _PUBLISHED.get(size),
  )


# By the sublayers of a block, S.
NAMES = {size: _name(size) for size in (1, 2, 4, 8, 16, 32)}
STUDY = variants.Study(
  "block_size",
  {variants.BASELINE: variants.PRENORM}
  | {name: _variant(size) for size, name in NAMES.items()},
  rates={variants.DEEP: (0.75e-3, 3e-3)},
  rate_seeds=2,
  budgets=(0.5, 2.0),
  shares=ablations.STUDY,
  deep=(NAMES[16],),
  deeper=(NAMES[32],),
)
# Of `scale=deep`, where nothing is shared.
DEEP = dataclasses.replace(STUDY, shares=None)
get_config, sweep = STUDY.get_config, STUDY.sweep
