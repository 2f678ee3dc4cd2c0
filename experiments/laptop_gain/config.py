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

NAME = "laptop_gain_"
# Fields that make each arm out of the network of configs/paired.py.
ARMS: Mapping[str, Mapping[str, Any]] = {
  "prenorm": {"model.residual.name": "prenorm"},
  "block": {"model.residual.name": "block_attnres"},
  "full": {"model.residual.name": "full_attnres"},
  "block_heads": {
    "model.residual.name": "block_attnres",
    "model.residual.read.heads": 4,
  },
  "denseformer": {"model.residual.name": "denseformer"},
}
LABELS: Mapping[str, str] = {
  "prenorm": "PreNorm",
  "block": "Block",
  "full": "Full",
  "block_heads": "Block, 4 heads",
  "denseformer": "DenseFormer",
}
# Tested after part=gain, each arm minus the other.
CONTRASTS = (
  ("block", "prenorm"),
  ("full", "prenorm"),
  ("denseformer", "prenorm"),
  ("block_heads", "block"),
)
TRIED_RATES = (0.0011, 0.0015, 0.0021, 0.003)
# Rates added because the best of the four was at an edge.
EXTRA_RATES: Mapping[str, tuple[float, ...]] = {
  "prenorm": (0.0042,),
  "block": (0.0042,),
  "block_heads": (0.0042,),
  "denseformer": (0.0042,),
}
# Each arm's own rate: the lowest mean loss of part=rates.
RATES: Mapping[str, float] = {
  "prenorm": 0.003,
  "block": 0.003,
  "full": 0.0015,
  "block_heads": 0.0042,
  "denseformer": 0.003,
}
RATE_SEEDS = (100, 101)
SEEDS = tuple(range(200, 212))
RATE_BUDGET, BUDGET = 2.0, 4.0
WARMUP_FRACTION = 0.05
# Losses at a quarter, half and three quarters of the way.
EVALUATIONS = 4
PLACES = ("quarter", "half", "three_quarters")


def get_config(arg: str | None = None) -> Any:
  """Config of one run; see the module docstring."""
  given = _parse(arg)
  fields = config_lib.choose("arm", given.arm, ARMS)
  config = paired.get_config(f"budget={given.budget},runlocal={given.runlocal}")
  with config.unlocked():
    config.name = f"{NAME}{given.arm}"
    config.update_from_flattened_dict(fields)
    steps = config.train.steps
    if rate := given.rate or RATES.get(given.arm):
      config.optim.peak_lr = rate
    config.optim.warmup_steps = max(1, round(WARMUP_FRACTION * steps))
    config.train.log_every = max(1, steps // 40)
    config.train.eval_every = max(1, steps // EVALUATIONS)
  return config


def sweep(add: Callable[..., Any], arg: str | None = None) -> None:
  """Adds the runs of one part, seed by seed."""
  given = _parse(arg)
  parts = {"rates": _rates, "gain": _gain}
  config_lib.choose("part", given.part, parts)(add)


def _rates(add: Callable[..., Any]) -> None:
  for seed in RATE_SEEDS:
    for arm in ARMS:
      for rate in (*TRIED_RATES, *EXTRA_RATES.get(arm, ())):
        _add(add, seed, arm=arm, rate=rate, budget=RATE_BUDGET)


def _gain(add: Callable[..., Any]) -> None:
  for seed in SEEDS:
    for arm in ARMS:
      _add(add, seed, arm=arm, budget=BUDGET)


def _add(add: Callable[..., Any], seed: int, **arguments: Any) -> None:
  add(**arguments, seed=seed, **{"data.seed": seed})


def _parse(arg: str | None) -> types.SimpleNamespace:
  return config_lib.parse_arg(
    arg, part="rates", arm="prenorm", rate=0.0, budget=RATE_BUDGET,
    runlocal=False,
  )  # fmt: skip
