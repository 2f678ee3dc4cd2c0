# SPDX-License-Identifier: Apache-2.0
"""AdamW, Muon, decay, clipping and balancing as written in their papers."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import optimizer
from tests.optimizer import muon_test


def _config(**fields):
  return config_lib.OptimConfig(**fields)


def _tree(w, v, bias, query=None):
  """A matrix, a gain, a bias; and a vector that does not decay."""
  tree = {
    "w": nnx.Param(jnp.float32(w), axes="D|E"),
    "v": nnx.Param(jnp.float32(v), axes="D"),
    "bias": nnx.Param(jnp.float32(bias), axes="E", load=True),
  }
  if query is not None:
    tree["query"] = nnx.Param(jnp.float32(query), axes="D", decays=False)
  return tree


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
  shapes = {"w": (1, 4, 6), "v": 4, "query": 4}
  params = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
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
    loads = _tree(**gradient, bias=load)
    updates, state = transform.update(
      loads, state, tree, learning_rate=rate, balance_rate=0.5
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
        nesterov = muon_test.orthogonal(g[0] + 0.7 * buffer)
        step = 0.3 * np.sqrt(6) * nesterov[None]
      tolerance = 0.05 if k == "w" and name == "muon" else 1e-5
      decayed = decay * params[k] * (k != "query")
      np.testing.assert_allclose(
        actual[k], -rate * (step + decayed), atol=tolerance * rate
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
