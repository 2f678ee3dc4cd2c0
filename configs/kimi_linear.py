# SPDX-License-Identifier: Apache-2.0
r"""Kimi Linear, the architecture that the AttnRes paper trains.

Three KDA mixers to one MLA, fine-grained experts, Muon (arXiv:2603.15031
section 5, arXiv:2510.26692). Any of it on a laptop, in about a minute:

  python -m attnres_jax.main --workdir=runs/kimi \
    --config=configs/kimi_linear.py:size=48b,residual=block_attnres,runlocal

`runlocal` keeps every part (KDA, MLA, dense first block, experts, Muon, the
size's schedule, the scheme) and shrinks its shape; it reads bytes of the
embedded corpus. The command above takes about 75 s of processor time (Intel
Xeon, jax 0.10.2), most of it for compiling, and ends at a validation loss of
2.85 nats per byte. The full sizes have been compiled, not run.

  size      194m 241m 296m 436m 528m: rows of the paper's Table 2
            48b: its section 5.2; 48b_32m: the batch and learning rate of the
            Kimi Linear report for the same network
  experts   number of routed experts; the released model has 256
  stage     pre: pre-training
            mid: mid-training, 400B tokens for the 48B
            long: after that, 60B tokens in sequences of 32,768

A stage continues the finished run of the stage before, as if its --workdir was
runs/NAME (runs/kimi_linear_48b_block_attnres); otherwise pass its folder:

  python -m attnres_jax.main --workdir=runs/mid \
    --config=configs/kimi_linear.py:size=48b,stage=mid \
    --config.train.start_from=gs://BUCKET/pre

The sizes have a vocabulary of 163,840. To train on your own tokens:

  --config.data.source=tokens --config.data.path=... \
  --config.data.tokenizer=ids

To reproduce the counts of Table 2, use experts=512 and
--config.model.moe.dense_layers=0. docs/kimi_linear.md says what is published,
what is derived and what is our choice.
"""

import dataclasses

from attnres_jax import config as c
from attnres_jax.scaling import architecture
from attnres_jax.scaling import paper

SMALL = {size.name.lower(): size for size in paper.TABLE_2}
# Tokens per batch (sequences of 4096) and peak learning rate. The paper gives
# no rate for its 8M: this is the report's rate at 32M, scaled by the square
# root of the ratio.
LARGE = {"48b": (8 * 2**20, 5.5e-4), "48b_32m": (32 * 2**20, 1.1e-3)}
LARGE_TOKENS = 1e12
LARGE_SEQUENCE_LENGTH = 4096
# Name -> the stage before it; its tokens as a fraction of pre-training's; and
# the learning rate at its start and end, as a fraction of the peak. The rate
# falls on one line through both stages.
STAGES = {
  "mid": ("pre", 0.4, 0.1, 0.0435),
  "long": ("mid", 0.06, 0.0435, 0.035),
}
LONG_SEQUENCE_LENGTH = 32_768

# What `get_config` accepts; tests build every value.
ARGUMENTS = {
  "size": (*SMALL, *LARGE),
  "residual": None,  # Any residual scheme.
  "experts": (256, 512, 64),
  "stage": ("pre", *STAGES),
  "runlocal": (False, True),
}


def get_config(arg=None):
  """Config of one run; see the module docstring."""
  arg = c.parse_arg(
    arg, size="194m", residual="block_attnres", experts=256, stage="pre",
    runlocal=False,
  )  # fmt: skip
  c.choose("size", arg.size, dict.fromkeys(ARGUMENTS["size"]))
  config = c.default_config()
  c.choose("stage", arg.stage, dict.fromkeys(ARGUMENTS["stage"]))
  name = _name(arg.size, "{}", arg.stage)
  config.name = c.follow(config, "model.residual.name", name.format)
  _network(config.model, arg)
  _recipe(config, arg.size)
  if arg.runlocal:
    shrink(config)
  if arg.stage in STAGES:
    _continue(config, arg)
  config.lock()
  return config


def _name(size, residual, stage):
  suffix = "" if stage == "pre" else f"_{stage}"
  return f"kimi_linear_{size}_{residual}{suffix}"


def _continue(config, arg):
  """Turns a config of pre-training into one of a later stage."""
  before, tokens, first_rate, last_rate = STAGES[arg.stage]
  config.train.start_from = f"runs/{_name(arg.size, arg.residual, before)}"
  optim, data = config.optim, config.data
  optim.schedule, optim.warmup_steps = "linear", 0
  optim.peak_lr *= first_rate
  optim.final_lr_fraction = last_rate / first_rate
  optim.balance_rate = 0.0
  config.train.steps = round(tokens * config.train.steps)
  if arg.stage == "long":
    times = 4 if arg.runlocal else LONG_SEQUENCE_LENGTH // data.sequence_length
    data.sequence_length *= times
    data.batch_size //= times


def of_table_2(size, arg, planned=False):
  """A size with the parameter counts that the paper prints, over 16 chips.

  With `planned`, its mesh is left to a plan. Layers are unrolled, under every
  scheme. A scan copies the arrays that the backward pass needs into stacks and
  out of them, an eighth of the bytes of a step of 194M with PreNorm.
  """
  config = get_config(
    f"size={size},residual={arg.residual},experts=512,runlocal={arg.runlocal}"
  )
  config.unlock()
  config.model.moe.dense_layers = 0
  config.model.scan_layers = arg.runlocal
  if not arg.runlocal and not planned:
    # Rows of every size divide over 16 chips.
    config.mesh.data, config.mesh.fsdp = 1, -1
  return config


def _network(model, arg):
  small = arg.size in SMALL
  network = SMALL[arg.size].model if small else architecture.KIMI_LINEAR_48B
  model.update(dataclasses.asdict(network))
  model.moe.num_experts, model.moe.dense_layers = arg.experts, 1
  model.residual.name = arg.residual
  model.residual.block_size = 4 if small else 6
  model.norm_eps = 1e-5
  model.dtype, model.remat = "bfloat16", "full"


def _recipe(config, size):
  optim = config.optim
  optim.name = "muon"
  if size in SMALL:
    row = SMALL[size]
    config.data.sequence_length = paper.SEQUENCE_LENGTH
    config.data.batch_size = row.batch_size
    optim.schedule, optim.peak_lr = "cosine", row.peak_lr
    steps = row.steps
  else:
    batch_tokens, optim.peak_lr = LARGE[size]
    config.data.sequence_length = LARGE_SEQUENCE_LENGTH
    config.data.batch_size = batch_tokens // LARGE_SEQUENCE_LENGTH
    optim.schedule = "wsd"
    steps = round(LARGE_TOKENS / batch_tokens)
  config.train.steps = steps
  optim.warmup_steps = c.follow(config, "train.steps", warmup_steps)
  config.train.eval_every = config.checkpoint.every_steps = 1000
  config.train.depth_every = 1000


def warmup_steps(steps):
  """A hundredth of the steps. The paper prints no warm-up: this is ours."""
  return min(2000, steps // 100)


def shrink(config):
  """Keeps every part and shrinks its shape, for a run of a minute on a CPU."""
  model = config.model
  model.width, model.num_heads, model.mlp_width = 64, 2, 144
  model.num_layers = 4  # One period of the pattern, more than one block.
  model.vocab_size = 0
  model.dtype, model.remat = "float32", "none"
  model.kda.head_width, model.kda.gate_rank, model.kda.chunk_size = 16, 16, 32
  model.mla.latent_rank, model.mla.nope_width = 32, 16
  model.mla.shared_width, model.mla.value_width = 8, 16
  model.moe.num_experts, model.moe.top_k, model.moe.expert_width = 8, 2, 48
  config.data.sequence_length, config.data.batch_size = 128, 8
  config.optim.peak_lr, config.optim.warmup_steps = 3e-3, 5
  config.train.steps = 40
  config.train.eval_every = config.train.depth_every = 20
  config.train.eval_batches = 2
  config.checkpoint.every_steps = 20
