# SPDX-License-Identifier: Apache-2.0
"""The rows of the paper's Table 4; see `experiments.variants`."""

import dataclasses

from attnres_jax.scaling import paper
from configs import paired
from experiments import variants
from experiments.variants import reads


def _slow_queries(factor: float, words: str) -> variants.Variant:
  variant = reads(
    f"Full, input-dependent query, {words} of the rate for it",
    "full_attnres",
    query="input",
  )
  rates = {"optim.rates": (f"^residual/queries/query={factor}",)}
  return dataclasses.replace(variant, fields={**variant.fields, **rates})


_VARIANTS = {
  variants.BASELINE: variants.PRENORM,
  "block": reads("Block", "block_attnres"),
  variants.CONTROL: variants.Variant(
    "PreNorm, other rounding", "prenorm", {"model.norm_eps": 2 * paired.EPSILON}
  ),
  "full": reads("Full", "full_attnres"),
  "mhc": reads("mHC", "mhc"),
  "denseformer": reads("DenseFormer", "denseformer"),
  "input_query": reads(
    "Full, input-dependent query", "full_attnres", query="input"
  ),
  "static": reads("Full, input-independent", "full_attnres", query="static"),
  "sigmoid": reads("Full, sigmoid", "full_attnres", score="sigmoid"),
  "no_key_norm": reads("Full, no key norm", "full_attnres", key_norm=False),
  "window": reads("Full, window of 1 + 8", "full_attnres", window=8),
  "block_heads": reads("Block, 16 heads", "block_attnres", heads=16),
  "block_no_key_norm": reads(
    "Block, no key norm", "block_attnres", key_norm=False
  ),
  # Not in the table: at the rate of all weights, these maps grow until one
  # source has nearly all the weight of a token. A step of Adam changes a logit
  # by a sum over the columns of both input and key, where a learned query has
  # one sum: about 1 / width of the rate makes these changes alike.
  "input_query_slow": _slow_queries(0.1, "a tenth"),
  "input_query_slower": _slow_queries(0.01, "a hundredth"),
}
STUDY = variants.Study(
  "ablations",
  {
    name: dataclasses.replace(variant, published=paper.TABLE_4.get(name))
    for name, variant in _VARIANTS.items()
  },
  rates={variants.LAPTOP: (1.5e-3, 6e-3)},
  rate_seeds=2,
  budgets=(0.5, 2.0),
  # It leaves its plateau later than all others.
  longer=("window",),
)
get_config, sweep = STUDY.get_config, STUDY.sweep
