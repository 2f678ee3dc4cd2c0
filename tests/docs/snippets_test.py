# SPDX-License-Identifier: Apache-2.0
"""The Python of README and docs runs."""

import re

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import build_model
from attnres_jax import load_config
from attnres_jax.models import layer_stacks
from tests import tiny_run

OWN = tiny_run.ROOT / "docs" / "in-your-own-model.md"


def code(page):
  """The names that the blocks of Python define, each run alone."""
  blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.S | re.M)
  assert blocks
  names = {}
  for block in blocks:
    exec(compile(block, page.name, "exec"), names)
  return names


def test_readme():
  names = code(tiny_run.ROOT / "README.md")
  assert names["logits_BTV"].shape == (1, 32, names["config"].model.vocab_size)
  weights = names["weights"]
  for rows in (weights.attention, weights.mlp, weights.output):
    np.testing.assert_allclose(np.nansum(rows, -1), 1, rtol=1e-5)


@pytest.fixture(scope="module")
def network():
  """A network with random pseudo-queries, its sublayers, and an embedding."""
  config = load_config(
    "configs/lm.py:size=micro,residual=block_attnres",
    {
      "model.num_layers": 4, "model.width": 32, "model.num_heads": 2,
      "model.residual.num_blocks": 2, "model.mlp_width": 64,
    },
  ).model  # fmt: skip
  model = build_model(config, seed=0)
  query = model.residual.queries.query
  query[...] = jax.random.normal(jax.random.key(1), query[...].shape)
  embedding_BTD = jax.random.normal(jax.random.key(2), (2, 8, config.width))
  sublayers = layer_stacks.in_order(model.sublayers, config.sublayer_kinds)
  return config, model, sublayers, embedding_BTD


def compare(got_BTD, model, embedding_BTD):
  want_BTD = model.hidden_of(embedding_BTD)
  got_BTD = model.final_norm(got_BTD)
  np.testing.assert_allclose(got_BTD, want_BTD, rtol=1e-6, atol=1e-6)


def test_plain_jax(network):
  config, model, sublayers, embedding_BTD = network
  functions = [
    lambda h_BTD, one=one: one.core(one.norm(h_BTD)) for one in sublayers
  ]
  queries = model.residual.queries
  reads = range(config.num_sublayers + 1)
  query_LD = jnp.stack([queries.single(l).query for l in reads])
  run = code(OWN)["block_attnres"]
  size = model.residual.block_size
  got_BTD = run(functions, query_LD, embedding_BTD, size)
  compare(got_BTD, model, embedding_BTD)


def test_nnx(network):
  config, model, sublayers, embedding_BTD = network
  cores, norms = zip(*((one.core, one.norm) for one in sublayers))
  trunk = code(OWN)["Trunk"](cores, norms, config, rngs=nnx.Rngs(0))
  trunk.residual = model.residual
  compare(trunk(embedding_BTD), model, embedding_BTD)


def test_a_trunk_refuses_sublayers_that_its_scheme_does_not_count(network):
  config, _, sublayers, _ = network
  cores, norms = zip(*((one.core, one.norm) for one in sublayers))
  trunk, rngs = code(OWN)["Trunk"], nnx.Rngs(0)
  with pytest.raises(AssertionError):
    trunk([*cores, cores[0]], [*norms, norms[0]], config, rngs=rngs)
