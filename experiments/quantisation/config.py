# SPDX-License-Identifier: Apache-2.0
"""The networks whose weights and caches are rounded, in pairs with PreNorm.

The protocol is that of experiments/noise, `settled` with batches of 4 rows: all
schemes share initial weights and the order of the data with PreNorm.

variant   a key of `VARIANTS`
runlocal  shrinks everything to seconds, to try things out
"""

from attnres_jax import config as c
from experiments.noise import config as noise

BASELINE = "prenorm"
# Name -> residual scheme, and the fields that differ.
VARIANTS = {
  BASELINE: ("prenorm", {}),
  "block": ("block_attnres", {}),
  "full": ("full_attnres", {}),
  "block_null": ("block_attnres", {"model.residual.read.null": "zero"}),
}
SEEDS = (0, 1, 2, 3)


def get_config(arg=None):
  """Config of one run; see the module docstring."""
  arg = c.parse_arg(arg, variant=BASELINE, runlocal=False)
  residual, fields = c.choose("variant", arg.variant, VARIANTS)
  protocol = ",".join(
    f"{name}={value}" for name, value in noise.SETTLED.items()
  )
  config = noise.get_config(
    f"{protocol},residual={residual},runlocal={arg.runlocal}"
  )
  config.name = f"quantisation_{arg.variant}"
  config.update_from_flattened_dict(fields)
  return config


def sweep(add, arg):
  """Every variant with every seed, seed by seed."""
  runlocal = c.parse_arg(arg, runlocal=False).runlocal
  for seed in SEEDS[:1] if runlocal else SEEDS:
    for variant in VARIANTS:
      add(variant=variant, seed=seed, **{"data.seed": seed})
