# SPDX-License-Identifier: Apache-2.0
"""Four networks at several sizes, each at its own learning rate.

part      rates: learning rates of each scheme at the pilot's size, one seed,
          half the tokens
          gain: each scheme at its own rate at every size, four other seeds
residual  prenorm, block_attnres, full_attnres or denseformer
size      0.07m, 0.14m, 0.25m (the pilot's), 1m, 4m or 16m: parameters without
          embeddings
budget    multiple of twenty tokens per parameter
runlocal  shrinks everything to seconds, to try things out
"""

from collections.abc import Callable, Mapping
import types
from typing import Any, NamedTuple

from attnres_jax import config as config_lib
from configs import paired


class Size(NamedTuple):
  """A network, and what it reads in a step: rows of `LENGTH` tokens.

  Block AttnRes sums `block_size` sublayers.
  """

  width: int
  layers: int
  block_size: int
  batch: int

  @property
  def mlp_width(self) -> int:
    """Hidden width of the gated MLP: 8/3 of the width, rounded up."""
    return -(-8 * self.width // (3 * MLP_MULTIPLE)) * MLP_MULTIPLE

  @property
  def parameters(self) -> int:
    """Of the matrices of all blocks: all but embedding, head and gains."""
    block = 4 * self.width**2 + 3 * self.width * self.mlp_width
    return self.layers * block


NAME = "gain_by_size_"
SIZES: Mapping[str, Size] = {
  "0.07m": Size(32, 5, 2, 2),
  "0.14m": Size(48, 5, 2, 4),
  "0.25m": Size(64, 5, 2, 8),
  "1m": Size(96, 9, 3, 16),
  "4m": Size(160, 12, 4, 32),
  "16m": Size(256, 20, 5, 64),
}
PILOT = "0.25m"
LENGTH, HEAD_WIDTH, MLP_MULTIPLE = 256, 32, 32
TOKENS_PER_PARAMETER = 20
# Learning rates of part=rates; a scheme whose lowest loss was at an end tried
# the next one there.
TRIED_RATES: Mapping[str, tuple[float, ...]] = {
  "prenorm": (0.0025, 0.005, 0.01, 0.02),
  "block_attnres": (0.0025, 0.005, 0.01, 0.00125),
  "full_attnres": (0.0025, 0.005, 0.01),
  "denseformer": (0.0025, 0.005, 0.01, 0.02),
}
SCHEMES = tuple(TRIED_RATES)
# Each scheme's own rate at the pilot's width: the lowest loss of part=rates. At
# another width it is divided by the ratio of widths.
RATES: Mapping[str, float] = {
  "prenorm": 0.01, "block_attnres": 0.0025, "full_attnres": 0.005,
  "denseformer": 0.01,
}  # fmt: skip
PARTS = {
  "rates": [
    {"size": PILOT, "residual": scheme, "budget": 0.5, "optim.peak_lr": rate,
     "seed": 100}
    for scheme in SCHEMES
    for rate in TRIED_RATES[scheme]
  ],
  "gain": [
    {"size": size, "residual": scheme, "seed": seed}
    for size in SIZES
    for seed in (200, 201, 202, 203)
    for scheme in SCHEMES
  ],
}  # fmt: skip
WARMUP_FRACTION = 0.05
SAVES, LOGS = 4, 40
# Folder of the prepared text; see corpus.py.
TEXT = "runs/gain_by_size_text/tokens"


def get_config(arg: str | None = None) -> Any:
  """Config of one run; see the module docstring."""
  given = _parse(arg)
  config_lib.choose("residual", given.residual, dict.fromkeys(SCHEMES))
  size = config_lib.choose("size", given.size, SIZES)
  config = paired.get_config(
    f"residual={given.residual},runlocal={given.runlocal}"
  )
  rate = RATES[given.residual]
  with config.unlocked():
    config.name = f"{NAME}{given.size}_{given.residual}"
    config.optim.peak_lr = rate
    if not given.runlocal:
      _enlarge(config, size, given.budget)
      config.optim.peak_lr = rate * SIZES[PILOT].width / size.width
      config.data.source, config.data.path = "tokens", TEXT
      config.data.tokenizer = "ids"
    steps = config.train.steps
    config.optim.warmup_steps = max(1, round(WARMUP_FRACTION * steps))
    config.train.log_every = max(1, steps // LOGS)
    config.checkpoint.every_steps = max(1, steps // SAVES)
  return config


def _enlarge(config: Any, size: Size, budget: float) -> None:
  model = config.model
  model.width, model.num_layers = size.width, size.layers
  model.num_heads, model.mlp_width = size.width // HEAD_WIDTH, size.mlp_width
  model.residual.block_size = size.block_size
  config.data.sequence_length, config.data.batch_size = LENGTH, size.batch
  tokens = TOKENS_PER_PARAMETER * size.parameters * budget
  steps = tokens / (LENGTH * size.batch)
  config.train.steps = LOGS * round(steps / LOGS)


def sweep(add: Callable[..., Any], arg: str | None = None) -> None:
  """Adds the runs of one part, seed by seed."""
  for run in config_lib.choose("part", _parse(arg).part, PARTS):
    add(**run, **{"data.seed": run["seed"]})


def _parse(arg: str | None) -> types.SimpleNamespace:
  return config_lib.parse_arg(
    arg, part="rates", residual="prenorm", size=PILOT, budget=1.0,
    runlocal=False,
  )  # fmt: skip
