# SPDX-License-Identifier: Apache-2.0
"""Networks of several kinds of sublayers compute one function, in any form."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models

# Four transformer blocks: mla mlp, kda moe, mla moe, mla moe. The last two are
# a scan under PreNorm and in the second block of four sublayers.
CONFIG = config_lib.ModelConfig(
  vocab_size=13,
  width=16,
  num_layers=4,
  mixers=("mla", "kda", "mla"),
  last_mixer="mla",
  num_heads=2,
  mlp_width=24,
  init_std=0.2,
  kda=config_lib.KdaConfig(head_width=8, gate_rank=4, chunk_size=4),
  mla=config_lib.MlaConfig(
    latent_rank=8, nope_width=8, shared_width=4, value_width=8
  ),
  moe=config_lib.MoeConfig(
    num_experts=6, top_k=2, expert_width=8, dense_layers=1
  ),
)
SCHEMES = [dict(name="prenorm"), dict(name="block_attnres", block_size=4)]


def _config(fields, **model):
  residual = config_lib.ResidualConfig(**fields)
  return dataclasses.replace(CONFIG, residual=residual, **model)


def _value_and_grad(config):
  tokens = np.random.default_rng(0).integers(0, 13, (2, 6), dtype=np.int32)

  @jax.jit
  @jax.value_and_grad
  def value(model):
    logits = model(tokens)
    return jnp.mean(jnp.sin(1.0 + jnp.arange(13.0))[None, None] * logits)

  return value(models.build_model(config))


def test_stacks_follow_the_pattern():
  model = models.build_model(_config(SCHEMES[0]))
  sizes = {
    kind: {leaf.shape[0] for leaf in jax.tree.leaves(stack)}
    for kind, stack in model.sublayers.items()
  }
  assert sizes == {"kda": {1}, "mla": {3}, "mlp": {1}, "moe": {3}}


@jax.jit
def _alone(part, h_BTD):
  return part.core(part.norm(h_BTD), None)


def test_sublayers_run_in_the_order_of_depth():
  model = models.build_model(_config(SCHEMES[0]))
  tokens = np.zeros((1, 3), np.int32)
  trace = jax.jit(lambda m: m.trace(tokens))(model)
  seen = dict.fromkeys(model.sublayers, 0)
  for l, kind in enumerate(CONFIG.sublayer_kinds):
    index, seen[kind] = seen[kind], seen[kind] + 1
    part = jax.tree.map(lambda a, i=index: a[i], model.sublayers[kind])
    expected = _alone(part, trace.reads[l])
    np.testing.assert_allclose(trace.values[l + 1], expected, atol=1e-4)


@pytest.mark.parametrize(
  "fields", [pytest.param(SCHEMES[0], marks=pytest.mark.slow), *SCHEMES[1:]]
)
def test_scans_and_checkpoints_change_nothing(fields):
  expected = _value_and_grad(_config(fields, scan_layers=False))
  for remat in ("none", "full"):
    found = _value_and_grad(_config(fields, remat=remat))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
      scale = 1e-3 + np.abs(b).max()
      np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * scale)
    # The load of the experts: every token, top_k times.
    load_LE = found[1].sublayers["moe"].core.selection_bias[...]
    assert load_LE.shape == (3, 6)
    np.testing.assert_array_equal(jnp.sum(load_LE, axis=1), 2 * 6 * 2)
