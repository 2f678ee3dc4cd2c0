# SPDX-License-Identifier: Apache-2.0
"""What holds for every registered scheme, at random parameters.

A scheme is compiled twice: as a scan, and cut in two parts of unrolled
sublayers with checkpoints, as a pipeline and `remat` would have it. The
definition of each scheme is tested in the file of its family.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax import models
from attnres_jax import optimizer
from attnres_jax import sharding
from attnres_jax.flops import traffic
from attnres_jax.models import residuals
from attnres_jax.models import stack
from tests import jaxprs

LENGTH = 5
CONFIG = config_lib.ModelConfig(
  vocab_size=12,
  width=8,
  num_layers=2,
  num_heads=2,
  mlp_width=12,
  init_std=0.3,
  residual=config_lib.ResidualConfig(block_size=3),
)
TOKENS = np.random.default_rng(0).integers(0, 12, (2, LENGTH), dtype=np.int32)


# With blocks of three, its four sublayers would attend to the embedding alone.
BLOCK_SIZES = {"delta_block": 1}


def _config(name, **fields):
  size = BLOCK_SIZES.get(name, CONFIG.residual.block_size)
  residual = dataclasses.replace(CONFIG.residual, name=name, block_size=size)
  return dataclasses.replace(CONFIG, residual=residual, **fields)


@functools.cache
def _network(name):
  """A network whose scheme is away from its start, which may be symmetric."""
  network = models.build_model(_config(name))
  rng = np.random.default_rng(1)
  moved = jax.tree.map(
    lambda a: a + 0.3 * rng.standard_normal(a.shape).astype(a.dtype),
    network.residual,
  )
  network.residual = moved
  return network


def _whole(network, tokens):
  return network(tokens)


def _in_parts(network, tokens):
  kinds, cut = network.config.sublayer_kinds, 2
  first, second = {}, {}
  for kind, part in network.sublayers.items():
    n = kinds[:cut].count(kind)
    first[kind] = jax.tree.map(lambda a, n=n: a[:n], part)
    second[kind] = jax.tree.map(lambda a, n=n: a[n:], part)
  scheme, options = network.residual, dict(scan=False, remat="full")
  state = scheme.init(network.embedding.encode(tokens))
  state = stack.run_part(first, kinds[:cut], scheme, state, None, **options)
  state = scheme.put_together(*scheme.take_apart(state))
  state = stack.run_part(
    second, kinds[cut:], scheme, state, None, start=cut, **options
  )
  h_BTD = network.final_norm(scheme.readout(state))
  return network.embedding.decode(h_BTD)


def _loss_and_gradient(forward):
  @jax.jit
  def run(network, tokens):
    def loss(network):
      logits = forward(network, tokens)
      weight = jnp.sin(1.0 + jnp.arange(logits.size, dtype=logits.dtype))
      return jnp.sum(weight * logits.reshape(-1)), logits

    return jax.value_and_grad(loss, has_aux=True)(network)

  return run


@pytest.mark.parametrize("name", residuals.RESIDUALS)
def test_scan_loop_parts_and_checkpoints_agree(name):
  network = _network(name)
  whole = _loss_and_gradient(_whole)
  (loss, logits), gradient = whole(network, TOKENS)
  assert np.isfinite(loss)
  (other, _), gradient_in_parts = _loss_and_gradient(_in_parts)(network, TOKENS)
  np.testing.assert_allclose(other, loss, rtol=1e-4)
  flat, _ = jax.tree_util.tree_flatten_with_path(gradient)
  for (path, a), b in zip(flat, jax.tree.leaves(gradient_in_parts)):
    where, size = jax.tree_util.keystr(path), 1e-6 + np.abs(a).max()
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-4 * size, err_msg=where)
    assert np.any(a), f"{where} gets no gradient"
  # Nothing looks ahead: the last token changes only the last logits.
  changed = TOKENS.copy()
  changed[:, -1] = (changed[:, -1] + 1) % CONFIG.vocab_size
  (_, others), _ = whole(network, changed)
  np.testing.assert_allclose(others[:, :-1], logits[:, :-1], atol=1e-5)
  assert np.abs(others - logits)[:, -1].max() > 1e-3


@pytest.mark.parametrize("name", residuals.RESIDUALS)
def test_full_checkpointing_recomputes_a_sublayer_once(name):
  width = 37  # Of nothing else in the program.
  config = _config(name, remat="full", scan_layers=False, mlp_width=width)
  network = jax.eval_shape(lambda: models.build_model(config))
  gradient = jax.grad(lambda network: jnp.sum(network(TOKENS)))
  hidden = [
    equation
    for equation in jaxprs.equations(jax.make_jaxpr(gradient)(network))
    if equation.primitive.name == "dot_general"
    and equation.outvars[0].aval.shape == (2, LENGTH, width)
  ]
  # Of an MLP: gate and up, both once more, and the gradient of their product.
  assert len(hidden) == 5 * CONFIG.num_layers


@pytest.mark.parametrize("name", residuals.RESIDUALS)
def test_abstract_properties(name):
  config = _config(name, dtype="bfloat16")
  network = jax.eval_shape(lambda: models.build_model(config))
  leaves = jax.tree.leaves(network)
  assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1, fsdp=2, tensor=2))
  shardings = sharding.state_sharding(network, mesh)
  assert len(jax.tree.leaves(shardings)) == len(leaves)
  assert len(jax.tree.leaves(optimizer.decays(network))) == len(leaves)
  h_BTD = jax.eval_shape(lambda m: m.hidden(TOKENS), network)
  assert h_BTD.dtype == jnp.bfloat16
  assert flops.flops_per_token(config, LENGTH).residual >= 0
  moved = traffic.of_scheme(config)
  assert moved.reads > 0 and moved.writes > 0


def test_names_and_families():
  assert sum(residuals.families().values(), []) == list(residuals.RESIDUALS)
  config = _config("hyper_conections")
  with pytest.raises(config_lib.ConfigError) as caught:
    residuals.abstract_residual(config)
  text = str(caught.value)
  assert "prenorm: prenorm, rescaled;" in text and "\n" not in text
