# SPDX-License-Identifier: Apache-2.0
r"""Scaling laws (paper, section 5.1): the same schemes at several sizes.

  python -m experiments.scaling_law.run --config=configs/scaling.py \
    --workdir=runs/scaling --max_parallel=2

trains the laptop sweep. Losses and times are in the README of
experiments/scaling_law. One of its runs:

  python -m attnres_jax.main --workdir=runs/one \
    --config=configs/scaling.py:scale=laptop,size=l,residual=full_attnres

  scale     laptop: attention and dense MLPs, bytes of the embedded corpus,
              four sizes, three schemes, three seeds, and at one size Rescaled,
              which has to agree with PreNorm up to noise
            first: its three smaller sizes with four seeds, half the bytes, a
            tenth of the validation split and one learning rate, for a first law
            in minutes (make sweep)
            laptop_lr: the search for learning rates, under PreNorm and Block
            pod: between these, for a v5e-8 or v6e-8: attention and dense
            MLPs, four sizes from 64M to 381M parameters, three schemes, three
            seeds, on a text of your own in the vocabulary of GPT-2
            paper: Table 2, with configs/kimi_linear.py
  size      one of the scale's sizes; empty for the smallest
  planned   mesh, microbatches and checkpointing are those that
            attnres_jax.plan.search has saved for the slice (docs/plan.md)
  runlocal  shrinks everything to seconds, to try things out

Within a size, all schemes share their hyper-parameters. They were chosen under
PreNorm at the laptop's and the paper's scale; the pod's are not searched yet.
To change the sweep, edit `LAPTOP`, `SCHEMES` or `SEEDS`, and launch into
another folder.
"""

import pathlib

from attnres_jax import config as c
from attnres_jax.config import load
from attnres_jax.scaling import grid

# Neighbours, which are found wherever this file is installed.
kimi_linear = load.load_file(
  str(pathlib.Path(__file__).with_name("kimi_linear.py"))
)

# width, layers, heads, mlp width, peak learning rate (PreNorm's best of
# laptop_lr)
LAPTOP = {
  "xs": (24, 4, 2, 64, 6e-3),
  "s": (32, 6, 2, 88, 24e-3),
  "m": (40, 8, 2, 104, 6e-3),
  "l": (48, 10, 3, 128, 12e-3),
}
# The same, without a search, and rows of a batch. All widths are multiples of
# 128, the lanes of a TPU.
POD = {
  "64m": (512, 12, 4, 1408, 2e-3, 256),
  "124m": (768, 12, 6, 2048, 1.5e-3, 256),
  "231m": (1024, 14, 8, 2816, 1.2e-3, 512),
  "381m": (1280, 16, 10, 3456, 1e-3, 512),
}
TINY = {
  "xs": (8, 2, 2, 24, 6e-3),
  "s": (8, 3, 2, 24, 6e-3),
  "m": (16, 2, 2, 40, 6e-3),
  "l": (16, 3, 2, 40, 6e-3),
}
PAPER = kimi_linear.SMALL
SCHEMES = ("prenorm", "block_attnres", "full_attnres")
SEEDS = (0, 1, 2)
# What is left out of scale=first, its seeds, validation batches and bytes per
# parameter.
TOO_LARGE, FIRST_SEEDS, FIRST_BATCHES, FIRST_TOKENS = "l", (0, 1, 2, 3), 128, 5
# Its learning rate: no scheme of the search is 0.05 nats above its best there.
FIRST_RATE = 6e-3
# The size at which Rescaled is trained as well.
CONTROL = "s"
LEARNING_RATES = (3e-3, 6e-3, 12e-3, 24e-3, 48e-3)
# Of the search for learning rates.
RATE_SCHEMES, RATE_SEEDS = SCHEMES[:2], SEEDS[:2]

# Bytes, and tokens of scale=pod, per parameter outside embedding and head.
TOKENS_PER_PARAM = 10
POD_TOKENS_PER_PARAM = 16
# GPT-2's vocabulary, padded.
POD_VOCABULARY, POD_LENGTH = 50_304, 1024
# Small batches and many steps, a rate that falls to zero, and the whole
# validation split: the protocol of configs/paired.py.
ROWS, LENGTH = 4, 128
# More batches than any validation split has.
EVERYTHING = 100_000
# Small compared with the mean square of any state, even of an average over
# depth at the start. Otherwise Rescaled would not be the same function as
# PreNorm.
EPSILON = 1e-9
# Sublayers per block, as for the paper's models of these depths.
BLOCK_SIZE = 4
# Budgets are multiples of this many steps.
GRAIN = 20

# What `get_config` accepts; tests build every value.
ARGUMENTS = {
  "scale": ("laptop", "laptop_lr", "first", "pod", "paper"),
  "size": ("", *LAPTOP),
  "residual": (*SCHEMES, "rescaled"),
  "planned": (False, True),
  "runlocal": (False, True),
}


def get_config(arg=None):
  """Config of one run; see the module docstring."""
  arg = _parse(arg)
  sizes = _sizes(arg)
  size = arg.size or next(iter(sizes))
  if arg.scale == "paper":
    config = kimi_linear.of_table_2(size, arg, arg.planned)
  elif arg.scale == "pod":
    config = _pod(c.choose("size", size, sizes), arg)
  else:
    config = _laptop(c.choose("size", size, sizes), arg)
  name = f"scaling_{arg.scale}_{size}_{{}}"
  config.name = c.follow(config, "model.residual.name", name.format)
  _lengthen(config, arg)
  if arg.planned:
    config.optim.accumulate_steps = 0
  config.lock()
  return config


def sweep(add, arg):
  """The runs of a scale."""
  arg = _parse(arg)
  sizes = _sizes(arg)
  if arg.scale == "laptop_lr":
    fields = {"optim.peak_lr": LEARNING_RATES}
    for seed in RATE_SEEDS:
      for run in grid.product(residual=RATE_SCHEMES, size=sizes, **fields):
        add(**run, seed=seed, **{"data.seed": seed})
    return
  # Seed by seed and from small to large, so that half a sweep is already
  # useful.
  seeds = {"paper": SEEDS[:1], "first": FIRST_SEEDS}.get(arg.scale, SEEDS)
  for seed in seeds:
    for size in sizes:
      control = arg.scale == "laptop" and size == CONTROL
      for residual in SCHEMES + ("rescaled",) * control:
        fields = {"seed": seed, "data.seed": seed}
        add(size=size, residual=residual, **fields)


def _parse(arg):
  arg = c.parse_arg(
    arg, scale="laptop", size="", residual="prenorm", planned=False,
    runlocal=False,
  )  # fmt: skip
  c.choose("scale", arg.scale, dict.fromkeys(ARGUMENTS["scale"]))
  return arg


def _sizes(arg):
  if arg.scale in ("paper", "pod"):
    return PAPER if arg.scale == "paper" else POD
  sizes = dict(TINY if arg.runlocal else LAPTOP)
  if arg.scale == "first":
    del sizes[TOO_LARGE]
  return sizes


def _laptop(shape, arg):
  config = c.default_config()
  model, data = config.model, config.data
  model.width, model.num_layers, model.num_heads, model.mlp_width, lr = shape
  model.residual.name, model.residual.block_size = arg.residual, BLOCK_SIZE
  model.norm_eps = EPSILON
  data.sequence_length, data.batch_size = LENGTH, ROWS
  config.optim.peak_lr, config.optim.final_lr_fraction = lr, 0.0
  config.train.log_every, config.train.eval_every = 40, 0
  config.train.eval_batches, config.train.depth_every = EVERYTHING, 0
  if arg.scale == "first":
    config.train.eval_batches = FIRST_BATCHES
    config.optim.peak_lr = FIRST_RATE
  per_param = FIRST_TOKENS if arg.scale == "first" else TOKENS_PER_PARAM
  tokens = per_param * _parameters(model)
  # As many bytes as in batches of 16 rows, with which this was compared.
  grain = GRAIN * 16 // ROWS
  config.train.steps = grain * round(tokens / (grain * ROWS * LENGTH))
  if arg.runlocal:
    data.sequence_length, data.batch_size = 32, 8
    config.train.steps = 2 * GRAIN
    config.train.log_every, config.train.eval_batches = 4, 2
  return config


def _pod(shape, arg):
  config = c.default_config()
  model, data = config.model, config.data
  *shape, data.batch_size = shape
  model.width, model.num_layers, model.num_heads, model.mlp_width, lr = shape
  model.residual.name, model.residual.block_size = arg.residual, BLOCK_SIZE
  model.vocab_size, model.tie_embeddings = POD_VOCABULARY, True
  model.dtype, model.remat = "bfloat16", "attention"
  # A scan copies what the backward pass needs.
  model.scan_layers = False
  data.sequence_length = POD_LENGTH
  config.optim.peak_lr = lr
  config.train.log_every, config.train.depth_every = 10, 0
  config.train.eval_every, config.train.eval_batches = 1000, 64
  tokens = POD_TOKENS_PER_PARAM * _parameters(model)
  config.train.steps = round(tokens / (data.batch_size * data.sequence_length))
  if not arg.planned:
    config.mesh.data, config.mesh.fsdp = 1, -1
  if arg.runlocal:
    model.width, model.mlp_width, model.num_layers = 8 * model.num_heads, 32, 2
    model.vocab_size, model.dtype, model.remat = 0, "float32", "none"
    data.sequence_length, data.batch_size = 32, 8
    config.train.steps = 2 * GRAIN
    config.train.log_every, config.train.eval_batches = 4, 2
  return config


def _parameters(model):
  """Parameters of a dense network outside embedding and head, without norms."""
  per_block = 4 * model.width**2 + 3 * model.width * model.mlp_width
  return per_block * model.num_layers


def _lengthen(config, arg):
  """Sets the steps of the budget, and everything that depends on them."""
  steps = max(1, round(config.train.steps / GRAIN)) * GRAIN
  config.train.steps = steps
  config.optim.schedule = "cosine"
  # At the paper's scale, the recipe of configs/kimi_linear.py, as in all sweeps
  # of its networks; 5 % is the laptop's protocol.
  of_paper = arg.scale == "paper"
  config.optim.warmup_steps = (
    kimi_linear.warmup_steps(steps) if of_paper else steps // 20
  )
  if config.train.eval_every:
    config.train.eval_every = steps // 4
  if not of_paper:  # A tenth may be ten hours.
    config.checkpoint.every_steps = steps // (4 if arg.scale == "first" else 10)
  config.checkpoint.keep_last = 2
