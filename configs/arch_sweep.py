# SPDX-License-Identifier: Apache-2.0
r"""Network shapes with equal compute and parameter counts (paper, Fig. 7).

  python -m experiments.arch_sweep.run --max_parallel=2 \
    --config=configs/arch_sweep.py --workdir=runs/arch_sweep

trains every shape under PreNorm and Full AttnRes; at laptop scale, about 20
minutes on two idle cores. One of its runs:

  python -m attnres_jax.main --workdir=runs/one \
    --config=configs/arch_sweep.py:rho=4.5,eta=0.5,residual=full_attnres

takes about two minutes and ends at a validation loss of 2.29 nats per byte
(PreNorm: 2.28; committed rows of experiments/arch_sweep, Intel Xeon, jax 0.12).


  scale     laptop: 15 shapes of 118k parameters, attention and dense MLPs,
            bytes of the embedded corpus
            paper: the 25 shapes of 230M activated parameters, at 6.5e19 FLOPs,
            with the parts of configs/kimi_linear.py
  rho       width over transformer blocks
  eta       heads over transformer blocks
  planned   mesh, microbatches and checkpointing are those that
            attnres_jax.plan.search has saved for the slice (docs/plan.md)
  runlocal  shrinks everything to seconds, to try things out

All shapes of a scale share their hyper-parameters. Unpublished ones of the
paper's scale are taken from the 241M row of Table 2.
"""

import pathlib

from attnres_jax import config as c
from attnres_jax.config import load
from attnres_jax.scaling import paper

# Neighbours, which are found wherever this file is installed.
kimi_linear = load.load_file(
  str(pathlib.Path(__file__).with_name("kimi_linear.py"))
)

# rho -> width, layers; eta times layers is the number of heads, rounded.
LAPTOP = {
  2.3: (28, 12),
  3.2: (32, 10),
  4.5: (36, 8),
  6.7: (40, 6),
  12.0: (48, 4),
}
LAPTOP_ETAS = (0.25, 0.5, 0.75)
LAPTOP_PARAMS = 118_000
LAPTOP_TOKENS_PER_PARAM = 4
# With batches of 16 rows, the best rate under PreNorm at size m of
# configs/scaling.py, and within 0.01 nats of the best at size s.
LAPTOP_RATE = 6e-3
ROWS, LENGTH = 16, 128
# As for the paper's models of these depths.
BLOCK_SIZE = 4
SCHEMES = ("prenorm", "full_attnres")
# The row of Table 2 with about the same parameters and tokens.
PAPER_ROW = "241m"
PAPER_CELLS = {
  (float(cell.width_per_layer), cell.heads_per_layer): cell
  for cell in paper.FIG_7
}

# What `get_config` accepts; tests build every value. The paper's shapes are
# available with scale=paper only.
ARGUMENTS = {
  "scale": ("laptop",),
  "rho": tuple(LAPTOP),
  "eta": LAPTOP_ETAS,
  "residual": (*SCHEMES, "block_attnres", "rescaled"),
  "planned": (False, True),
  "runlocal": (False, True),
}


def get_config(arg=None):
  """Config of one run; see the module docstring."""
  arg = _parse(arg)
  make = c.choose("scale", arg.scale, {"laptop": _laptop, "paper": _paper})
  config = make(arg)
  name = f"arch_{arg.scale}_{arg.rho:g}_{arg.eta:g}_{{}}"
  config.name = c.follow(config, "model.residual.name", name.format)
  steps = config.train.steps
  config.optim.schedule = "cosine"
  # As in configs/scaling.py.
  of_paper = arg.scale == "paper"
  config.optim.warmup_steps = (
    kimi_linear.warmup_steps(steps) if of_paper else steps // 20
  )
  config.train.eval_every = steps // 4
  if not of_paper:
    config.checkpoint.every_steps = steps // 4
  config.train.depth_every = 0
  config.checkpoint.keep_last = 2
  if arg.planned:
    config.optim.accumulate_steps = 0
  config.lock()
  return config


def sweep(add, arg):
  """Every shape under every scheme, the schemes of a shape together."""
  if _parse(arg).scale == "paper":
    shapes = list(PAPER_CELLS)
  else:
    shapes = [(rho, eta) for rho in LAPTOP for eta in LAPTOP_ETAS]
  for rho, eta in shapes:
    for residual in SCHEMES:
      add(rho=rho, eta=eta, residual=residual)


def _parse(arg):
  return c.parse_arg(
    arg, scale="laptop", rho=4.5, eta=0.5, residual="prenorm", planned=False,
    runlocal=False,
  )  # fmt: skip


def _laptop(arg):
  width, layers = _choose("rho", arg.rho, LAPTOP)
  eta = _choose("eta", arg.eta, {eta: eta for eta in LAPTOP_ETAS})
  heads = round(eta * layers)
  config = c.default_config()
  model = config.model
  model.width, model.num_layers, model.num_heads = width, layers, heads
  # Rotary positions need an even width; the MLP gets the remaining parameters.
  model.head_width = 2 * -(-width // (2 * heads))
  attention = 4 * width * heads * model.head_width
  rest = LAPTOP_PARAMS / layers - attention
  model.mlp_width = round(rest / (3 * width))
  model.residual.name, model.residual.block_size = arg.residual, BLOCK_SIZE
  config.data.sequence_length, config.data.batch_size = LENGTH, ROWS
  config.optim.peak_lr = LAPTOP_RATE
  tokens = LAPTOP_TOKENS_PER_PARAM * LAPTOP_PARAMS
  config.train.steps = round(tokens / (ROWS * LENGTH))
  config.train.log_every, config.train.eval_batches = 10, 32
  if arg.runlocal:
    config.data.sequence_length, config.data.batch_size = 32, 8
    config.train.steps, config.train.eval_batches = 40, 2
  return config


def _paper(arg):
  cell = _choose("rho, eta", (arg.rho, arg.eta), PAPER_CELLS)
  config = kimi_linear.of_table_2(PAPER_ROW, arg, arg.planned)
  if not arg.runlocal:
    model = config.model
    for name in ("width", "num_layers", "num_heads", "mlp_width"):
      setattr(model, name, getattr(cell.model, name))
    model.moe.expert_width = cell.model.moe.expert_width
    batch_tokens = config.data.batch_size * config.data.sequence_length
    config.train.steps = round(cell.tokens / batch_tokens)
  return config


def _choose(field, value, table):
  if value not in table:
    c.fail(field, value, "one of " + ", ".join(map(str, table)))
  return table[value]
