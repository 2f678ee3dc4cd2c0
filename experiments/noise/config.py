# SPDX-License-Identifier: Apache-2.0
"""Runs that differ in one source of noise only, under several protocols.

  recipe    plain: the first one of configs/scaling.py; the rate ends at 10 % of
            its peak, and the last weights are evaluated on part of the split
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
from configs import paired
from configs import scaling

SIZE = "s"
# Rows of a batch in the first recipe, and what it evaluated.
ROWS, EVALUATED = 16, 512
EPSILON, OTHER_EPSILON = scaling.EPSILON, 2 * scaling.EPSILON
# Share of all steps, at the end, whose weights are averaged.
AVERAGED = 0.1
SEEDS = (0, 1, 2, 3)

PLAIN = dict(recipe="plain", rows=ROWS, rate=12e-3)
SETTLED = dict(recipe="settled", rows=4, rate=6e-3)
SLOWER = SETTLED | dict(rate=3e-3)
SINGLE = SETTLED | dict(rows=1, rate=3e-3)
# Of the search: rates of each batch, under PreNorm, and its seeds.
RATES = {
  4: (3e-3, 6e-3, 12e-3),
  ROWS: (3e-3, 6e-3, 12e-3),
  64: (12e-3, 24e-3),
}
RATE_SEEDS = {4: SEEDS[:2], ROWS: SEEDS[:1], 64: SEEDS[:1]}


def get_config(arg=None):
  """Config of one run; see the module docstring."""
  arg = c.parse_arg(
    arg, recipe="settled", rows=ROWS, rate=PLAIN["rate"],
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
  """The search for rates, then pairs and controls, most useful first."""
  if c.parse_arg(arg, runlocal=False).runlocal:
    listed = pairs(SETTLED, 0) + pairs(SETTLED, 1)
  else:
    listed = _search()
    for seed in SEEDS:
      listed += pairs(SETTLED, seed)
    # The same initial weights on other data, and the reverse.
    for seed in SEEDS:
      for residual in ("prenorm", "block_attnres"):
        listed += [_run(SETTLED, residual, seed, order=seed ^ 1)]
    listed += [_rounded(_run(SETTLED, "block_attnres", seed)) for seed in SEEDS]
    for protocol in (SINGLE, SLOWER, PLAIN):
      for seed in SEEDS:
        listed += pairs(protocol, seed)
  added = []
  for run in listed:
    if run not in added:
      add(**run)
      added.append(run)


def _search():
  """Rates of each batch, under PreNorm."""
  return [
    _run(dict(recipe="settled", rows=rows, rate=rate), "prenorm", seed)
    for rows, rates in RATES.items()
    for rate in rates
    for seed in RATE_SEEDS[rows]
  ]


def pairs(protocol, seed):
  """A pair of schemes, and PreNorm with other rounding."""
  return [
    _run(protocol, "prenorm", seed),
    _rounded(_run(protocol, "prenorm", seed)),
    _run(protocol, "block_attnres", seed),
  ]


def _rounded(run):
  return run | {"model.norm_eps": OTHER_EPSILON}


def _run(protocol, residual, seed, order=None):
  order = seed if order is None else order
  return protocol | {"residual": residual, "seed": seed, "data.seed": order}


def _plain(config):
  config.optim.final_lr_fraction = 0.1
  # As many bytes, whatever the batch.
  config.train.eval_batches = EVALUATED // config.data.batch_size


def _settled(config):
  paired.settle(config)
  config.train.average_last = AVERAGED


_RECIPES = {"plain": _plain, "settled": _settled}
