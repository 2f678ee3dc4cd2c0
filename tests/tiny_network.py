# SPDX-License-Identifier: Apache-2.0
"""A network that suits eight devices of a CPU; shared by several tests."""

from attnres_jax import config as config_lib

# Fields of a model of width 16 with sublayers of every kind.
KINDS = dict(
  mixers=("kda", "mla"),
  kda=config_lib.KdaConfig(head_width=8, gate_rank=4, chunk_size=8),
  mla=config_lib.MlaConfig(
    latent_rank=8, nope_width=8, shared_width=4, value_width=8
  ),
  moe=config_lib.MoeConfig(
    num_experts=4, top_k=2, expert_width=8, dense_layers=1
  ),
)
