# SPDX-License-Identifier: Apache-2.0
"""The Python of README and docs runs."""

import functools
import re

from flax import linen as linen_lib
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


def test_readme(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  names = code(tiny_run.ROOT / "README.md")
  weights = names["weights"]
  for rows in (weights.attention, weights.mlp, weights.output):
    np.testing.assert_allclose(np.nansum(rows, -1), 1, rtol=1e-5)
  # It has been trained: it reads some sources more than others.
  assert np.nanmax(weights.mlp) > 0.5
  assert (tmp_path / "weights.png").stat().st_size > 1000


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
  functions = [lambda h_BTD, s=s: s.core(s.norm(h_BTD)) for s in sublayers]
  queries = model.residual.queries
  reads = range(config.num_sublayers + 1)
  query_LD = jnp.stack([queries.single(l).query for l in reads])
  run = code(OWN)["block_attnres"]
  size = model.residual.block_size
  got_BTD = run(functions, query_LD, embedding_BTD, size)
  compare(got_BTD, model, embedding_BTD)


def gained(norm):
  """Norms of other people with the same eps and gain, and their function."""
  gain_D = norm.gain[...]

  def function(h_BTD):
    rms = jnp.sqrt(jnp.mean(h_BTD**2, axis=-1, keepdims=True) + norm.eps)
    return h_BTD / rms * gain_D[None, None]

  flax = nnx.RMSNorm(len(gain_D), epsilon=norm.eps, rngs=nnx.Rngs(0))
  flax.scale[...] = gain_D
  linen = linen_lib.RMSNorm(epsilon=norm.eps)
  bound = functools.partial(linen.apply, {"params": {"scale": gain_D}})
  return {"ours": norm, "nnx": flax, "linen": bound, "function": function}


@pytest.mark.parametrize("kind", ["ours", "nnx", "linen", "function"])
def test_any_norm_gives_what_ours_does(network, kind):
  config, model, sublayers, embedding_BTD = network
  cores = [s.core for s in sublayers]
  norms = [gained(s.norm)[kind] for s in sublayers]
  trunk = code(OWN)["Trunk"](cores, norms, config, rngs=nnx.Rngs(0))
  trunk.residual = model.residual
  compare(trunk(embedding_BTD), model, embedding_BTD)


def test_blocks_under_scans(network):
  """`lax.scan` with the operators, and `nnx.scan` with a scheme."""
  config, model, _, embedding_BTD = network
  residual, size = model.residual, model.residual.block_size
  # One scan needs sublayers of one kind, so all are MLPs.
  layers = jax.tree.map(
    lambda a: jnp.concatenate([a, a[::-1]]), model.sublayers["mlp"]
  )
  count = config.num_sublayers
  each = layer_stacks.unstack(layers, count)
  names = code(OWN)
  trunk = names["Trunk"](
    [s.core for s in each], [s.norm for s in each], config,
    rngs=nnx.Rngs(0),
  )  # fmt: skip
  trunk.residual = residual
  wanted_BTD = trunk(embedding_BTD)

  reads = [residual.queries.single(l).query for l in range(count + 1)]
  query_LD, blocks = jnp.stack(reads), [embedding_BTD]
  apply = lambda layer, h_BTD: layer.core(layer.norm(h_BTD))
  state = residual.init(embedding_BTD)

  @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
  def step(carry, layer, slot):
    h_BTD, carry = residual.read(carry, slot, layer.norm)
    return residual.write(carry, slot, layer.core(h_BTD))

  for start, stop in residual.segments():
    assert stop - start == size > 1
    rows = jax.tree.map(lambda a, at=slice(start, stop): a[at], layers)
    query_QD = query_LD[start:stop]
    blocks.append(names["scan_block"](apply, rows, query_QD, blocks))
    carry, slots = residual.open(state, start, stop)
    state = residual.close(state, step(carry, rows, slots), stop)
  out_QBTD, _ = names["depth_attention"](query_LD[count:], blocks)
  np.testing.assert_allclose(out_QBTD[0], wanted_BTD, rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(
    residual.readout(state), wanted_BTD, rtol=1e-6, atol=1e-6
  )
