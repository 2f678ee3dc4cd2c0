# SPDX-License-Identifier: Apache-2.0
"""Tiny networks, so that a test names only the fields that it is about."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import models

# Sublayers of every kind; the mixers repeat over any even depth.
KINDS = dict(
  mixers=("kda", "mla"),
  kda=config_lib.KdaConfig(head_width=8, gate_rank=4, chunk_size=4),
  mla=config_lib.MlaConfig(
    latent_rank=8, nope_width=8, shared_width=4, value_width=8
  ),
  moe=config_lib.MoeConfig(
    num_experts=4, top_k=2, expert_width=8, dense_layers=1
  ),
)

# All of them divide over two devices.
_FIELDS = dict(
  vocab_size=16, width=16, num_layers=2, num_heads=2, mlp_width=24, init_std=0.2
)
_OF_MODEL = {field.name for field in dataclasses.fields(config_lib.ModelConfig)}


def config(name: str = "block_attnres", **fields) -> config_lib.ModelConfig:
  """A network of four sublayers under the residual scheme `name`.

  Args:
    name: the scheme; one that sums blocks has two of them.
    **fields: of `ModelConfig`, and options of the scheme.
  """
  residual = {f: fields.pop(f) for f in fields.keys() - _OF_MODEL}
  if not residual.get("block_size"):
    residual.setdefault("num_blocks", 2)
  return config_lib.ModelConfig(
    residual=config_lib.residual_config(name, **residual), **_FIELDS | fields
  )


def model(
  name: str = "block_attnres", seed: int = 0, **fields
) -> models.Transformer:
  return models.build_model(config(name, **fields), seed=seed)


def moved(tree, spread: float):
  """With noise on each parameter, which may start where it has no effect."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda a: jnp.float32(a + spread * rng.standard_normal(a.shape)), tree
  )


@functools.cache
def full_size() -> config_lib.ModelConfig:
  """The 48B network of the paper, to count and to trace."""
  return config_lib.load_config("configs/kimi_linear.py:size=48b").model
