# SPDX-License-Identifier: Apache-2.0
"""Networks of several kinds of sublayers compute one function, in any form."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from tests import tiny_network

# Four transformer blocks: mla mlp, kda moe, mla moe, mla moe.
FIELDS = tiny_network.KINDS | dict(
  num_layers=4, mixers=("mla", "kda", "mla"), last_mixer="mla"
)


def _model(name, **fields):
  return tiny_network.model(name, **FIELDS | fields)


def _value_and_grad(model):
  tokens = np.random.default_rng(0).integers(0, 16, (2, 6), dtype=np.int32)

  @jax.jit
  @jax.value_and_grad
  def value(model):
    logits = model(tokens)
    return jnp.mean(jnp.sin(1.0 + jnp.arange(16.0))[None, None] * logits)

  return value(model)


@pytest.mark.more
@pytest.mark.parametrize(
  "name,remat",
  [
    ("block_attnres", "full"),
    # Neither is one of the two alone; layer_stacks_test.py has them on toys.
    pytest.param("block_attnres", "none", marks=pytest.mark.slow),
    pytest.param("prenorm", "full", marks=pytest.mark.slow),
    pytest.param("prenorm", "none", marks=pytest.mark.slow),
  ],
)
def test_scans_and_checkpoints_change_nothing(name, remat):
  # mla moe mla moe, which is a scan, and kda moe.
  fields = dict(
    num_layers=3,
    block_size=4,
    mixers=("mla", "mla", "kda"),
    last_mixer="",
    moe=dataclasses.replace(FIELDS["moe"], dense_layers=0),
  )
  expected = _value_and_grad(_model(name, scan_layers=False, **fields))
  actual = _value_and_grad(_model(name, remat=remat, **fields))
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
    scale = 1e-3 + np.abs(b).max()
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * scale)
  # The load of the experts: every token, top_k times.
  load_LE = actual[1].sublayers["moe"].core.selection_bias[...]
  assert load_LE.shape == (3, 4)
  np.testing.assert_array_equal(jnp.sum(load_LE, axis=1), 2 * 6 * 2)


def test_an_unknown_last_mixer_is_named():
  with pytest.raises(config_lib.ConfigError, match="model.last_mixer: got 'ls"):
    tiny_network.model("prenorm", last_mixer="lstm", num_layers=2)
