# SPDX-License-Identifier: Apache-2.0
"""Runs that differ in one source of noise only, under several protocols.

  recipe    plain: that of configs/scaling.py; the rate ends at 10 % of its
            peak, and the last weights are evaluated on part of the split
            settled: the rate falls to zero, and the averaged weights of the
            last steps are evaluated on the whole validation split
  rows      per batch, of 128 bytes; all runs see the same number of bytes
  rate      the peak
  residual  the residual scheme
  runlocal  shrinks everything to seconds, to try things out

Seeds and the epsilon of the norms are fields: `seed` draws the initial weights,
`data.seed` the order of the data, and `model.norm_eps` changes nothing but
rounding.
"""

from attnres_jax import config as c
from configs import scaling

SIZE = "s"
EPSILON, OTHER_EPSILON = scaling.EPSILON, 2 * scaling.EPSILON
AVERAGED = 0.1
SEEDS = (0, 1, 2, 3)
# Seeds of the search for rates, which uses PreNorm only.
RATE_SEEDS = SEEDS[:2]
PLAIN = dict(recipe="plain", rows=scaling.ROWS, rate=12e-3)
# The rates of each batch that are tried.
RATES = {4: (3e-3, 6e-3, 12e-3), 16: (3e-3, 6e-3, 12e-3), 64: (12e-3, 24e-3)}


def get_config(arg=None):
  """Config of one run; see the module docstring."""
  arg = c.parse_arg(
    arg, recipe="settled", rows=scaling.ROWS, rate=PLAIN["rate"],
    residual="prenorm", runlocal=False,
  )  # fmt: skip
  config = scaling.get_config(
    f"size={SIZE},residual={arg.residual},runlocal={arg.runlocal}"
  )
  with config.unlocked():
    tokens = config.train.steps * config.data.batch_size
    config.data.batch_size, config.optim.peak_lr = arg.rows, arg.rate
    steps = config.train.steps = tokens // arg.rows
    config.optim.warmup_steps = steps // 20
    config.train.log_every = max(1, steps // 40)
    config.train.eval_every = config.checkpoint.every_steps = 0
    c.choose("recipe", arg.recipe, _RECIPES)(config)
  return config


def sweep(add, arg):
  """The search for rates, then pairs and controls of every protocol."""
  seeds = RATE_SEEDS
  if c.parse_arg(arg, runlocal=False).runlocal:
    seeds = SEEDS[:1]
  for seed in seeds:
    for rows, rates in RATES.items():
      for rate in rates:
        run = dict(recipe="settled", rows=rows, rate=rate, residual="prenorm")
        add(**run, seed=seed, **{"data.seed": seed})


def _plain(config):
  # As many bytes as there, whatever the batch.
  rows = config.train.eval_batches * scaling.ROWS
  config.train.eval_batches = rows // config.data.batch_size


def _settled(config):
  config.optim.schedule, config.optim.final_lr_fraction = "linear", 0.0
  config.train.average_last = AVERAGED
  # More than there are.
  config.train.eval_batches = 100_000


_RECIPES = {"plain": _plain, "settled": _settled}
