# SPDX-License-Identifier: Apache-2.0
"""Four residual schemes on real text; see `experiments.variants`."""

from experiments import variants
from experiments.variants import reads

STUDY = variants.Study(
  "demo",
  {
    variants.BASELINE: variants.PRENORM,
    # PreNorm's function, so that its gap is noise.
    variants.CONTROL: reads("Rescaled", "rescaled"),
    "full": reads("Full AttnRes", "full_attnres"),
    "block": reads("Block AttnRes", "block_attnres"),
  },
  scale=variants.DEMO,
  seeds=12,
)
get_config, sweep = STUDY.get_config, STUDY.sweep
