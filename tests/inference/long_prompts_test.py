# SPDX-License-Identifier: Apache-2.0
"""Prompts whose blocks and partial sums are cut along the sequence."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import sharding
from attnres_jax.inference import programs
from attnres_jax.models.mixers import cache as cache_lib
from attnres_jax.models.mixers import causal_attention
from attnres_jax.plan import collectives
from attnres_jax.plan import hlo
from tests import tiny_network

DEVICES, LENGTH = 8, 32
# All kinds of sublayers, cut over eight devices.
FIELDS = tiny_network.KINDS | dict(
  num_layers=3, num_heads=8, mlp_width=32, mixers=("kda", "mla", "attention")
)


def _mesh():
  return sharding.make_mesh(config_lib.MeshConfig(data=1, tensor=DEVICES))


@pytest.mark.more
@pytest.mark.parametrize(
  ("name", "cached"),
  [
    pytest.param("block_attnres", 0, marks=pytest.mark.slow),
    ("block_attnres", LENGTH),
    pytest.param("full_attnres", LENGTH, marks=pytest.mark.slow),
    pytest.param("prenorm", LENGTH, marks=pytest.mark.slow),
  ],
)
def test_collectives_of_a_chunk(name, cached):
  """Each sublayer gathers its input and scatters its output, and that is all.

  Between the embedding, whose sum is scattered too, and the head, which needs
  one token.
  """
  config = tiny_network.config(name, scan_layers=False, **FIELDS)
  model = jax.eval_shape(lambda: models.build_model(config))
  program_of = programs.trace_extend(model, _mesh(), LENGTH, cached, 2 * LENGTH)
  program = hlo.Program(program_of.lower().compile().as_text())
  parts = collections.Counter(config.sublayer_kinds)
  counts, largest = collections.Counter(), 0
  for op in collectives.of_program(program):
    computation, name = op.place
    source = program.computations[computation][name].op_name
    if "part<" in source and "head" not in source:
      counts[op.kind] += op.count
      assert len(op.group) == DEVICES
      largest = max(largest, *(a.nbytes for a in op.arrays))
  assert counts == {
    "all-gather": sum(parts.values()),
    "reduce-scatter": sum(parts.values()) + 1,
  }
  # Of activations, not of weights, which are larger.
  assert largest == 4 * LENGTH * config.width


def test_tiles_of_queries(monkeypatch):
  """In tiles, queries of a later chunk attend to the same tokens."""
  model = tiny_network.model("prenorm", mixers=("attention",))
  tokens_BT = np.random.default_rng(0).integers(0, 16, (2, 24))

  def hidden(model, tokens_BT):
    cache = model.init_cache(2, 24)
    first = model.extend(tokens_BT[:, :8], cache, jnp.array([8, 5]), context=0)
    cache = cache_lib.append(cache, first.added)
    return model.extend(tokens_BT[:, 8:], cache, context=8).hidden_BTD

  expected = jax.jit(hidden)(model, tokens_BT)
  monkeypatch.setattr(causal_attention, "TILE", 5)
  in_tiles = jax.jit(lambda *arguments: hidden(*arguments))
  assert "while" in in_tiles.lower(model, tokens_BT).as_text()
  actual = in_tiles(model, tokens_BT)
  np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
