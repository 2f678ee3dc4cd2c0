# SPDX-License-Identifier: Apache-2.0
r"""Networks on which residual schemes are compared in pairs of runs.

  python -m attnres_jax.main --workdir=runs/one \
    --config=configs/paired.py:residual=block_attnres

takes about four minutes of processor time (an estimate from its step time; AMD
EPYC, jax 0.10.2). The training protocol is the result of a study of noise
(dev/LOG.md): small batches and many steps, a rate that falls to zero, the whole
validation split. A pair has the same `seed` (initial weights of everything but
the scheme) and `data.seed` (order of the data).

  scale     laptop: 16 sublayers, 1.0M parameters, bytes of the embedded corpus
            demo: 8 sublayers, 0.2M parameters, a tenth of a million tokens,
            for a difference that a laptop sees in minutes
            deep: the same with 32 sublayers, 2.1M parameters
            paper: the row of Table 2 with 16 transformer blocks, which its
            Table 4 ablates, unchanged; configs/kimi_linear.py
  residual  the residual scheme
  budget    multiplies the steps
  planned   mesh, microbatches and checkpointing are those that
            attnres_jax.plan.search has saved for the slice (docs/plan.md)
  runlocal  shrinks everything to seconds, to try things out

All schemes of a scale share their hyper-parameters, which were chosen under
PreNorm at the paper's scale. At the laptop's and in the deep network, PreNorm
tried three rates (experiments/ablations and block_size), in the demo's four.
"""

import pathlib

from attnres_jax import config as c
from attnres_jax.config import load

# Neighbours, which are found wherever this file is installed.
kimi_linear = load.load_file(
  str(pathlib.Path(__file__).with_name("kimi_linear.py"))
)
scaling = load.load_file(str(pathlib.Path(__file__).with_name("scaling.py")))

PAPER_ROW = "436m"
# The best of 0.0015, 0.003 and 0.006 under PreNorm, with two seeds
# (experiments/ablations).
LAPTOP_RATE = 3e-3
# The best of 0.00075, 0.0015 and 0.003, the same way (experiments/block_size).
DEEP_RATE = 1.5e-3
# The best of 0.001, 0.002, 0.004 and 0.008 under PreNorm, with four seeds
# (experiments/demo).
DEMO_RATE = 2e-3
EPSILON = scaling.EPSILON

# What `get_config` accepts; tests build every value. The other scales are those
# of other configs, and tests of experiments/ablations build their networks.
ARGUMENTS = {
  "scale": ("demo", "laptop", "deep"),
  "residual": ("prenorm", "block_attnres"),
  "budget": (0.5, 1.0),
  "planned": (False, True),
  "runlocal": (False, True),
}


def get_config(arg=None):
  """Config of one run; see the module docstring."""
  arg = c.parse_arg(
    arg, scale="laptop", residual="prenorm", budget=1.0, planned=False,
    runlocal=False,
  )  # fmt: skip
  make = c.choose("scale", arg.scale, _SCALES)
  config = make(arg)
  name = f"paired_{arg.scale}_{{}}"
  config.name = c.follow(config, "model.residual.name", name.format)
  config.train.steps = max(1, round(arg.budget * config.train.steps))
  config.train.depth_every = 0
  if arg.planned:
    config.optim.accumulate_steps = 0
  config.lock()
  return config


def settle(config):
  """The end of a run: a rate of zero, and the whole validation split."""
  config.optim.schedule, config.optim.final_lr_fraction = "linear", 0.0
  config.train.eval_batches = scaling.EVERYTHING


def _laptop(arg):
  config = c.default_config()
  model = config.model
  model.width, model.num_layers, model.num_heads = 96, 8, 4
  model.mlp_width = 320
  model.residual.name, model.residual.block_size = arg.residual, 4
  model.norm_eps = EPSILON
  config.data.sequence_length, config.data.batch_size = 128, 4
  config.optim.peak_lr, config.optim.warmup_steps = LAPTOP_RATE, 72
  config.train.steps, config.train.log_every = 1440, 36
  config.train.eval_every, config.checkpoint.every_steps = 0, 480
  config.checkpoint.keep_last = 1
  settle(config)
  if arg.runlocal:
    model.width, model.num_layers, model.num_heads = 32, 3, 2
    model.mlp_width = 64
    config.data.sequence_length = 32
    config.train.steps, config.optim.warmup_steps = 40, 4
    config.train.log_every, config.train.eval_batches = 4, 4
  return config


def _demo(arg):
  config = _laptop(arg)
  config.checkpoint.every_steps = 100
  if not arg.runlocal:
    model = config.model
    model.width, model.num_layers, model.num_heads = 64, 4, 2
    model.mlp_width = 160
    config.train.steps, config.train.log_every = 200, 10
    config.optim.peak_lr, config.optim.warmup_steps = DEMO_RATE, 20
    # A tenth of the split: differences are of the same tokens.
    config.train.eval_batches = 64
  return config


def _deep(arg):
  config = _laptop(arg)
  if not arg.runlocal:
    config.model.num_layers *= 2
    config.optim.peak_lr = DEEP_RATE
  return config


def _paper(arg):
  return kimi_linear.of_table_2(PAPER_ROW, arg, arg.planned)


_SCALES = {"demo": _demo, "laptop": _laptop, "deep": _deep, "paper": _paper}
