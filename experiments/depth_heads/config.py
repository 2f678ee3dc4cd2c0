# SPDX-License-Identifier: Apache-2.0
"""Block AttnRes with H softmaxes per read; see `experiments.variants`.

Three series: queries that start at zero (as in arXiv:2603.15031), at random
(standard deviation 0.02, as in the first version of arXiv:2607.27230), and one
head whose logits are multiplied by 1/sqrt(H). The last separates the two things
that heads change: H softmaxes, and logits that are sums of D / H terms, so that
for one length of the query they are smaller by sqrt(H).
"""

from experiments import variants
from experiments.ablations import config as ablations

HEADS = (1, 2, 4, 8, 16)
ZERO, RANDOM, COOL, COOL_RANDOM = "zero", "random", "cool", "cool_random"
_RANDOM = {"query_init": 0.02}
# What a series changes besides the number of heads.
_SERIES = {ZERO: {}, RANDOM: _RANDOM, COOL: {}, COOL_RANDOM: _RANDOM}
LABELS = {
  ZERO: "queries from zero",
  RANDOM: "random queries",
  COOL: "one head at the temperature of H, from zero",
  COOL_RANDOM: "one head at the temperature of H, random",
}
_SHARED = {(ZERO, 1): "block", (ZERO, 16): "block_heads"}
# Of the last two series; with H = 1 they are the first two.
COOL_HEADS = (4, 16)


def _name(series: str, heads: int) -> str:
  return _SHARED.get((series, heads), f"{series}{heads}")


def _variant(series: str, heads: int) -> variants.Variant:
  options = dict(_SERIES[series])
  if series in (COOL, COOL_RANDOM):
    options["logit_scale"] = heads**-0.5
  elif heads > 1:
    options["heads"] = heads
  name = _name(series, heads)
  variant = variants.reads(
    f"H = {heads}, {LABELS[series]}", "block_attnres", **options
  )
  ablated = ablations.STUDY.variants.get(name)
  return ablated.labelled(variant.label) if ablated else variant


# (series, H) -> name.
NAMES = {
  (series, heads): _name(series, heads)
  for series in _SERIES
  for heads in (COOL_HEADS if series in (COOL, COOL_RANDOM) else HEADS)
}
STUDY = variants.Study(
  "depth_heads",
  {variants.BASELINE: variants.PRENORM}
  | {name: _variant(*key) for key, name in NAMES.items()},
  longer=("zero4", "block"),
  shares=ablations.STUDY,
)
get_config, sweep = STUDY.get_config, STUDY.sweep
