# SPDX-License-Identifier: Apache-2.0
"""The config of one run, and the runs of the sweep.

residual  the residual scheme
runlocal  shrinks everything to seconds, to try things out
"""

from attnres_jax import config as c
from attnres_jax.scaling import grid
from configs import lm


def get_config(arg=None):
  """Config of one run; see the module docstring."""
  arg = c.parse_arg(arg, residual="prenorm", runlocal=False)
  size = "micro" if arg.runlocal else "tiny"
  config = lm.get_config(f"size={size},residual={arg.residual}")
  config.unlock()
  config.train.depth_every = 0
  if arg.runlocal:
    config.train.steps = config.train.eval_every = 20
    config.data.sequence_length, config.data.batch_size = 32, 4
    config.optim.warmup_steps, config.train.eval_batches = 2, 2
  return config


def sweep(add, arg):
  """Adds every scheme with every seed; a run is given by its overrides."""
  seeds = (0,) if c.parse_arg(arg, runlocal=False).runlocal else (0, 1, 2)
  for run in grid.product(seed=seeds, residual=("prenorm", "block_attnres")):
    add(**run, **{"data.seed": run["seed"]})
