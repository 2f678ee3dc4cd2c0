# SPDX-License-Identifier: Apache-2.0
"""The depth of Kimi K3: 93 transformer blocks of width 7168, in blocks of 12.

A preset of shapes, to compile, count and measure depth attention at; not the
network, most of whose parts are not described here.

  python -m attnres_jax.flops --config=configs/kimi_k3_attnres.py
  python -m attnres_jax.main --workdir=runs/k3 \
    --config=configs/kimi_k3_attnres.py:residual=block_attnres,runlocal

Certain (its report and released configuration): 93 transformer blocks, 69 with
KDA and 24 with MLA; width 7168; AttnRes blocks of 12 transformer blocks, which
are 24 sublayers here, so that there are 8 of them, the last with 9 transformer
blocks, and at most 9 sources with the embedding; the epsilon 1e-5; two reads
per transformer block and one at the output.

Stand-ins: where the 24 MLA are (every fourth and the last, as in Kimi Linear,
which gives the right count), their gate, which is left out; number of heads,
experts and their width (the real network has 2.8T parameters, 104B of them
activated; this one 1.1T and 55B); vocabulary. `runlocal` keeps a short last
block.
"""

from attnres_jax import config as c
from attnres_jax.scaling import architecture

# What `get_config` takes; tests build every value.
ARGUMENTS = {
  "residual": ("block_attnres", "prenorm"),
  "runlocal": (False, True),
}


def get_config(arg=None):
  """Config of one run; see the module docstring."""
  arg = c.parse_arg(arg, residual="block_attnres", runlocal=False)
  config = c.default_config()
  config.name = f"kimi_k3_{arg.residual}"
  model = config.model
  model.width, model.num_layers = 7168, 93
  model.mixers, model.last_mixer = ("kda", "kda", "kda", "mla"), "mla"
  model.residual.name, model.residual.block_size = arg.residual, 24
  model.norm_eps = 1e-5
  model.dtype, model.remat = "bfloat16", "full"
  # Stand-ins from here on.
  model.num_heads = 56
  model.moe.num_experts, model.moe.expert_width = 256, 2048
  model.moe.dense_layers, model.mlp_width = 1, 9 * 2048
  model.vocab_size = architecture.VOCAB_SIZE
  config.data.sequence_length, config.data.batch_size = 8192, 1024
  config.optim.name, config.optim.schedule = "muon", "wsd"

  if arg.runlocal:
    # Seven transformer blocks by two: the last block has one.
    model.num_layers, model.residual.block_size = 7, 4
    model.width, model.num_heads, model.mlp_width = 64, 2, 128
    model.kda.head_width = model.kda.gate_rank = 16
    model.mla.latent_rank, model.mla.nope_width = 32, 16
    model.mla.shared_width, model.mla.value_width = 8, 16
    model.moe.num_experts, model.moe.top_k, model.moe.expert_width = 8, 2, 32
    model.vocab_size = 0
    model.dtype, model.remat = "float32", "none"
    config.data.sequence_length, config.data.batch_size = 128, 8
    config.optim.peak_lr, config.optim.warmup_steps = 3e-3, 5
    config.train.steps = 40
    config.train.eval_every = config.train.depth_every = 20
    config.train.eval_batches = 2
    config.checkpoint.every_steps = 20
  config.lock()
  return config
