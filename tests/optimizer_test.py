# SPDX-License-Identifier: Apache-2.0
"""AdamW, Muon, decay, clipping and balancing as written in their papers."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import optimizer
from tests import tiny_network


def _config(**fields):
  return config_lib.OptimConfig(**fields)


def test_decay_alone():
  """Without a gradient there is only decay, and only where it applies."""
  model = tiny_network.model()
  transform = optimizer.make_optimizer(_config(weight_decay=0.25))
  zeros = jax.tree.map(jnp.zeros_like, model)

  @jax.jit
  def update(zeros, model):
    return transform.update(
      zeros, transform.init(model), model, learning_rate=2.0, balance_rate=0.0
    )[0]

  updates = update(zeros, model)
  for actual, params in (
    (updates.sublayers, model.sublayers),
    (updates.embedding, model.embedding),
    (updates.final_norm, model.final_norm),
  ):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(params)):
      np.testing.assert_allclose(a, -0.5 * b, rtol=1e-6)
  for leaf in jax.tree.leaves(updates.residual):
    np.testing.assert_array_equal(leaf, 0.0)


def _tree(w, v, bias):
  """A matrix, a gain, a bias."""
  return {
    "w": nnx.Param(jnp.float32(w), axes="D|E"),
    "v": nnx.Param(jnp.float32(v), axes="D"),
    "bias": nnx.Param(jnp.float32(bias), axes="E", load=True),
  }


def _orthogonal(g, iterations=5):
  x = g / np.linalg.norm(g)
  for _ in range(iterations):
    a = x @ x.T
    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
  return x


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("clip_norm", [0.0, 0.5, 100.0])
def test_steps_by_definition(name, clip_norm):
  """Clipping over weights only, both optimisers, decay, separate balancing."""
  b1, b2, eps, decay = 0.8, 0.9, 1e-3, 0.1
  config = _config(
    name=name, b1=b1, b2=b2, eps=eps, weight_decay=decay, clip_norm=clip_norm,
    muon_momentum=0.7, muon_update_rms=0.3,
  )  # fmt: skip
  rng = np.random.default_rng(0)
  params = {"w": rng.standard_normal((1, 4, 6)), "v": rng.standard_normal(4)}
  bias = np.array([0.5, -0.25, 0.0])
  transform = optimizer.make_optimizer(config)
  tree = _tree(**params, bias=bias)
  state = transform.init(tree)
  m = {k: 0.0 for k in params}
  v = {k: 0.0 for k in params}
  buffer = 0.0
  for t in range(1, 4):
    gradient = {k: rng.standard_normal(p.shape) for k, p in params.items()}
    load = np.array([1000.0, 4000.0, 7000.0])
    rate = 0.1 * t
    updates, state = transform.update(
      _tree(**gradient, bias=load),
      state,
      tree,
      learning_rate=rate,
      balance_rate=0.5,
    )
    actual = {name: update[...] for name, update in updates.items()}
    norm = np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
    assert 0.5 < norm < 100
    factor = min(1.0, clip_norm / norm) if clip_norm else 1.0
    for k, g in gradient.items():
      g = factor * g
      m[k] = b1 * m[k] + (1 - b1) * g
      v[k] = b2 * v[k] + (1 - b2) * g**2
      step = m[k] / (1 - b1**t) / (np.sqrt(v[k] / (1 - b2**t)) + eps)
      if k == "w" and name == "muon":
        buffer = 0.7 * buffer + g[0]
        step = 0.3 * np.sqrt(6) * _orthogonal(g[0] + 0.7 * buffer)[None]
      tolerance = 0.05 if k == "w" and name == "muon" else 1e-5
      np.testing.assert_allclose(
        actual[k], -rate * (step + decay * params[k]), atol=tolerance * rate
      )
    # Signs +, 0, - of what is missing; their mean is zero.
    np.testing.assert_allclose(actual["bias"], [0.5, 0.0, -0.5], atol=1e-7)


def test_balancing_at_rate_zero_and_with_uneven_signs():
  transform = optimizer.make_optimizer(_config())
  tree = _tree(np.ones((1, 2, 4)), np.ones(2), np.ones(4))
  load = _tree(np.ones((1, 2, 4)), np.ones(2), [9, 1, 1, 1])
  for rate, expected in ((0.0, np.zeros(4)), (1.0, [-1.5, 0.5, 0.5, 0.5])):
    updates, _ = transform.update(
      load, transform.init(tree), tree, learning_rate=1.0, balance_rate=rate
    )
    np.testing.assert_array_equal(updates["bias"][...], expected)


@pytest.mark.parametrize("name", sorted(optimizer.OPTIMIZERS))
def test_state_has_no_room_for_selection_biases(name):
  tree = _tree(np.ones((1, 2, 3)), np.ones(2), np.ones(3))
  state = optimizer.make_optimizer(_config(name=name)).init(tree)
  shapes = sorted(leaf.shape for leaf in jax.tree.leaves(state))
  moments = [(1, 2, 3)] * 2 if name == "adamw" else [(1, 2, 3)]
  assert shapes == sorted([(), (2,), (2,), *moments])
