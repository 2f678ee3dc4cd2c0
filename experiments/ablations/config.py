# SPDX-License-Identifier: Apache-2.0
"""The rows of the paper's Table 4; see `experiments.variants`."""

from configs import paired
from experiments import variants
from experiments.variants import reads

STUDY = variants.Study(
  "ablations",
  {
    variants.BASELINE: variants.PRENORM,
    "block": reads("Block", "block_attnres", 1.746),
    variants.CONTROL: variants.Variant(
      "PreNorm, other rounding",
      "prenorm",
      {"model.norm_eps": 2 * paired.EPSILON},
    ),
    "full": reads("Full", "full_attnres", 1.737),
    "mhc": reads("mHC", "mhc", 1.747),
    "denseformer": reads("DenseFormer", "denseformer", 1.767),
    "input_query": reads(
      "Full, input-dependent query", "full_attnres", 1.731, query="input"
    ),
    "static": reads(
      "Full, input-independent", "full_attnres", 1.749, query="static"
    ),
    "sigmoid": reads("Full, sigmoid", "full_attnres", 1.741, score="sigmoid"),
    "no_key_norm": reads(
      "Full, no key norm", "full_attnres", 1.743, key_norm=False
    ),
    "window": reads("Full, window of 1 + 8", "full_attnres", 1.764, window=8),
    "block_heads": reads("Block, 16 heads", "block_attnres", 1.752, heads=16),
    "block_no_key_norm": reads(
      "Block, no key norm", "block_attnres", 1.750, key_norm=False
    ),
  },
  rates=(1.5e-3, 6e-3),
  rate_seeds=2,
  budgets=(0.5, 2.0),
)
get_config, sweep = STUDY.get_config, STUDY.sweep
