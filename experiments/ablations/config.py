# SPDX-License-Identifier: Apache-2.0
"""The rows of the paper's Table 4, in pairs of runs with PreNorm.

scale     laptop, d768 or paper, see configs/paired.py
variant   a row of the table, or `control`
budget    multiplies the steps
first     the first seed
seeds     how many; of the laptop's scale, more can be added at any time
runlocal  shrinks everything to seconds, to try things out
"""

import dataclasses

from attnres_jax import config as c
from configs import paired


@dataclasses.dataclass(frozen=True)
class Variant:
  """A row of Table 4.

  Attributes:
    label: in tables and figures.
    residual: its scheme.
    published: loss in the paper (436M activated parameters); None for rows that
      are not in it.
    fields: what it changes of the scheme.
  """

  label: str
  residual: str
  published: float | None
  fields: dict


def _variant(label, residual, published, **read):
  fields = {f"model.residual.read.{name}": read[name] for name in read}
  return Variant(label, residual, published, fields)


BASELINE, CONTROL = "prenorm", "control"
# The most informative first, for sweeps that are not complete.
VARIANTS = {
  BASELINE: _variant("PreNorm", "prenorm", 1.766),
  "block": _variant("Block", "block_attnres", 1.746),
  CONTROL: Variant(
    "PreNorm, other rounding", "prenorm", None,
    {"model.norm_eps": 2 * paired.EPSILON},
  ),
  "full": _variant("Full", "full_attnres", 1.737),
  "mhc": _variant("mHC", "mhc", 1.747),
  "denseformer": _variant("DenseFormer", "denseformer", 1.767),
  "input_query": _variant(
    "Full, input-dependent query", "full_attnres", 1.731, query="input"
  ),
  "static": _variant(
    "Full, input-independent", "full_attnres", 1.749, query="static"
  ),
  "sigmoid": _variant("Full, sigmoid", "full_attnres", 1.741, score="sigmoid"),
  "no_key_norm": _variant(
    "Full, no key norm", "full_attnres", 1.743, key_norm=False
  ),
  "window": _variant("Full, window of 1 + 8", "full_attnres", 1.764, window=8),
  "block_heads": _variant("Block, 16 heads", "block_attnres", 1.752, heads=16),
  "block_no_key_norm": _variant(
    "Block, no key norm", "block_attnres", 1.750, key_norm=False
  ),
}  # fmt: skip
# Rates that PreNorm is tried with beside its own, and seeds of this search.
RATES = (1.5e-3, 6e-3)
RATE_SEEDS = 2
# Budgets of PreNorm beside its own, for effective speed-ups.
BUDGETS = (0.5, 2.0)


def get_config(arg=None):
  """Config of one run; see the module docstring."""
  arg = _parse(arg)
  variant = c.choose("variant", arg.variant, VARIANTS)
  config = paired.get_config(
    f"scale={arg.scale},residual={variant.residual},budget={arg.budget},"
    f"runlocal={arg.runlocal}"
  )
  config.name = f"ablations_{arg.scale}_{arg.variant}"
  config.update_from_flattened_dict(variant.fields)
  return config


def sweep(add, arg):
  """Every row with every seed, seed by seed; then rates and budgets."""
  arg = _parse(arg)
  seeds = range(arg.first, arg.first + arg.seeds)
  for seed in seeds:
    for variant in VARIANTS:
      # Rounding is that of PreNorm at the laptop's scale.
      if variant != CONTROL or arg.scale == "laptop":
        _add(add, variant, seed)
  if arg.scale == "laptop":
    for seed in seeds:
      for rate in RATES if seed < RATE_SEEDS else ():
        _add(add, BASELINE, seed, **{"optim.peak_lr": rate})
      for budget in BUDGETS:
        _add(add, BASELINE, seed, budget=budget)


def _add(add, variant, seed, **more):
  add(variant=variant, **more, seed=seed, **{"data.seed": seed})


def _parse(arg):
  return c.parse_arg(
    arg, scale="laptop", variant=BASELINE, budget=1.0, first=0, seeds=1,
    runlocal=False,
  )  # fmt: skip
