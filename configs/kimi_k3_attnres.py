# SPDX-License-Identifier: Apache-2.0
r"""The depth of Kimi K3: 93 transformer blocks of width 7168, in blocks of 12.

A preset of shapes at which to compile, count and measure depth attention. It is
not the actual network, whose other parts we mostly do not know.

  python -m attnres_jax.flops --config=configs/kimi_k3_attnres.py
  python -m attnres_jax.main --workdir=runs/k3 \
    --config=configs/kimi_k3_attnres.py:residual=block_attnres,runlocal

The second command takes about 110 s of processor time (Intel Xeon, jax 0.10.2),
most of it for compiling, and ends at a validation loss of 3.00 nats per byte.
The full size has been counted, not run.

Published, in its report or released configuration: 93 transformer blocks, 69
with KDA and 24 with MLA; width 7168; epsilon 1e-5; AttnRes blocks of 12
transformer blocks (24 sublayers), so 8 blocks, the last with 9 transformer
blocks, and at most 9 sources including the embedding; two reads per transformer
block and one at the output.

Stand-ins: the positions of the 24 MLA (every fourth and the last, as in Kimi
Linear, which gives the right count); MLA without its gate; the number of heads,
the number and width of experts, and the vocabulary. The real network has 2.8T
parameters, 104B of them activated; this one has 1.1T and 55B. `runlocal` also
ends with a shorter block.
"""

import pathlib

from attnres_jax import config as c
from attnres_jax.config import load
from attnres_jax.scaling import architecture

# Neighbours, which are found wherever this file is installed.
kimi_linear = load.load_file(
  str(pathlib.Path(__file__).with_name("kimi_linear.py"))
)

# What `get_config` accepts; tests build every value.
ARGUMENTS = {
  "residual": ("block_attnres", "prenorm"),
  "runlocal": (False, True),
}


def get_config(arg=None):
  """Config of one run; see the module docstring."""
  arg = c.parse_arg(arg, residual="block_attnres", runlocal=False)
  config = c.default_config()
  config.name = c.follow(config, "model.residual.name", "kimi_k3_{}".format)
  model = config.model
  model.width, model.num_layers = 7168, 93
  model.mixers, model.last_mixer = ("kda", "kda", "kda", "mla"), "mla"
  model.residual.name, model.residual.block_size = arg.residual, 24
  model.norm_eps = 1e-5
  model.dtype, model.remat = "bfloat16", "full"
  # The rest are stand-ins.
  model.num_heads = 56
  model.moe.num_experts, model.moe.expert_width = 256, 2048
  model.moe.dense_layers, model.mlp_width = 1, 9 * 2048
  model.vocab_size = architecture.VOCAB_SIZE
  config.data.sequence_length, config.data.batch_size = 8192, 1024
  config.optim.name, config.optim.schedule = "muon", "wsd"

  if arg.runlocal:
    kimi_linear.shrink(config)
    # Seven transformer blocks in AttnRes blocks of two: the last has one.
    model.num_layers, model.residual.block_size = 7, 4
    model.mlp_width, model.moe.expert_width = 128, 32
    model.kda.chunk_size = 64
  config.lock()
  return config
