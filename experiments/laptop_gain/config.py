# SPDX-License-Identifier: Apache-2.0
"""Five networks, each at its own learning rate; see the README here.

part      rates: four learning rates per network, two seeds, half the steps
          gain: each network at its own rate, twelve other seeds
arm       the network: prenorm, block, full, block_heads or denseformer
rate      peak learning rate; 0 takes the arm's own (RATES)
budget    multiple of the steps of configs/paired.py
runlocal  shrinks everything to seconds, to try things out
"""

from collections.abc import Callable, Mapping
import types
from typing import Any

from attnres_jax import config as config_lib
from configs import paired
from experiments import variants

NAME = "laptop_gain_"
ARMS: Mapping[str, variants.Variant] = {
  "prenorm": variants.Variant("PreNorm", "prenorm"),
  "block": variants.reads("Block", "block_attnres"),
  "full": variants.reads("Full", "full_attnres"),
  "block_heads": variants.reads("Block, 4 heads", "block_attnres", heads=4),
  "denseformer": variants.Variant("DenseFormer", "denseformer"),
}
# Tested after part=gain, each arm minus the other.
CONTRASTS = (
  ("block", "prenorm"), ("full", "prenorm"), ("denseformer", "prenorm"),
  ("block_heads", "block"),
)  # fmt: skip
# Learning rates of part=rates; one more where the best of four was at an edge.
TRIED_RATES: Mapping[str, tuple[float, ...]] = {
  arm: (0.0011, 0.0015, 0.0021, 0.003) + (0.0042,) * (arm != "full")
  for arm in ARMS
}
# Each arm's own: the lowest mean loss of part=rates.
RATES: Mapping[str, float] = {
  "prenorm": 0.003, "block": 0.003, "full": 0.0015, "block_heads": 0.0042,
  "denseformer": 0.003,
}  # fmt: skip
RATE_BUDGET, BUDGET = 2.0, 4.0
PARTS = {
  "rates": [
    dict(arm=arm, rate=rate, budget=RATE_BUDGET, seed=seed)
    for seed in (100, 101)
    for arm in ARMS
    for rate in TRIED_RATES[arm]
  ],
  "gain": [
    dict(arm=arm, budget=BUDGET, seed=seed)
    for seed in range(200, 212)
    for arm in ARMS
  ],
}
WARMUP_FRACTION = 0.05
# Losses at a quarter, half and three quarters of the way.
EVALUATIONS = 4
PLACES = ("quarter", "half", "three_quarters")


def get_config(arg: str | None = None) -> Any:
  """Config of one run; see the module docstring."""
  given = _parse(arg)
  arm = config_lib.choose("arm", given.arm, ARMS)
  config = paired.get_config(
    f"residual={arm.residual},budget={given.budget},runlocal={given.runlocal}"
  )
  with config.unlocked():
    config.name = f"{NAME}{given.arm}"
    config.update_from_flattened_dict(arm.fields)
    steps = config.train.steps
    if rate := given.rate or RATES.get(given.arm):
      config.optim.peak_lr = rate
    config.optim.warmup_steps = max(1, round(WARMUP_FRACTION * steps))
    config.train.log_every = max(1, steps // 40)
    config.train.eval_every = max(1, steps // EVALUATIONS)
  return config


def sweep(add: Callable[..., Any], arg: str | None = None) -> None:
  """Adds the runs of one part, seed by seed."""
  for run in config_lib.choose("part", _parse(arg).part, PARTS):
    add(**run, **{"data.seed": run["seed"]})


def _parse(arg: str | None) -> types.SimpleNamespace:
  return config_lib.parse_arg(
    arg, part="rates", arm="prenorm", rate=0.0, budget=RATE_BUDGET,
    runlocal=False,
  )  # fmt: skip
