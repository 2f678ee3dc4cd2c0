# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters stay, factors multiply, and the state fits any groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import optimizer
from tests import tiers
from tests import tiny_network

OLD = ("^embedding/", "^sublayers/", "^final_norm/")


def _model():
  """With experts, whose selection biases have a separate optimiser."""
  return tiny_network.model(moe=tiny_network.KINDS["moe"])


def _updates(model, gradient, name="adamw", **fields):
  """Two updates, and the state after them."""
  config = config_lib.OptimConfig(name=name, **fields)
  transform = optimizer.make_optimizer(config)

  @jax.jit
  def run(model, gradient):
    state = transform.init(model)
    rates = dict(learning_rate=0.5, balance_rate=0.25)
    for _ in range(2):
      updates, state = transform.update(gradient, state, model, **rates)
    return updates, state

  return run(model, gradient)


def _gradient(model):
  rng = np.random.default_rng(0)
  draw = lambda a: jnp.asarray(rng.standard_normal(a.shape), a.dtype)
  return jax.tree.map(draw, model)


@tiers.parametrize("name", ["adamw", "muon"], first=["muon"])
def test_only_queries_and_gains_are_trained(name):
  model = _model()
  gradient = _gradient(model)
  # As large as they like: they do not count in the clipped norm, either.
  gradient.embedding = jax.tree.map(lambda a: 1e6 * a, gradient.embedding)
  updates, state = _updates(model, gradient, name, freeze=OLD)
  others, _ = _updates(model, gradient, name)
  for part in (updates.embedding, updates.sublayers, updates.final_norm):
    for leaf in jax.tree.leaves(part):
      np.testing.assert_array_equal(leaf, 0.0)
  of_scheme = jax.tree.map(jnp.zeros_like, gradient)
  of_scheme.residual = gradient.residual
  ours, _ = _updates(model, of_scheme, name)
  for a, b, c in zip(
    *(jax.tree.leaves(tree.residual) for tree in (updates, ours, others))
  ):
    np.testing.assert_allclose(a, b, rtol=1e-6)
    assert np.abs(a - c).max() > 1e-4
  # A run without groups can start from it.
  plain = optimizer.make_optimizer(config_lib.OptimConfig(name=name))
  expected = jax.eval_shape(plain.init, model)
  assert jax.tree.structure(state) == jax.tree.structure(expected)


def test_a_frozen_gradient_that_is_not_finite_does_nothing():
  model = _model()
  gradient = _gradient(model)
  gradient.embedding = jax.tree.map(lambda a: a * jnp.nan, gradient.embedding)
  updates, _ = _updates(model, gradient, freeze=OLD)
  for leaf in jax.tree.leaves(updates):
    assert np.isfinite(leaf).all()


def test_factors_multiply_and_the_first_counts():
  model = _model()
  gradient = _gradient(model)
  rates = ("query$=10", "^residual/=3", "table=0.5")
  updates, _ = _updates(model, gradient, rates=rates)
  plain, _ = _updates(model, gradient)
  for factor, a, b in (
    (10, updates.residual.queries.query, plain.residual.queries.query),
    (3, updates.residual.queries.gain, plain.residual.queries.gain),
    (0.5, updates.embedding.table, plain.embedding.table),
    (1, updates.embedding.head, plain.embedding.head),
  ):
    np.testing.assert_allclose(a[...], factor * b[...], rtol=1e-6)
    assert np.abs(b[...]).max() > 0.1


@pytest.mark.parametrize(
  "fields,message",
  [
    (dict(freeze=("^queries",)), r"optim.freeze: got '\^queries', expected a"),
    (dict(rates=("gates=2",)), "optim.rates: got 'gates', expected a pattern"),
    (dict(freeze=("",)), "optim.freeze: got .*, expected to leave something"),
  ],
)
def test_patterns_that_match_nothing_or_everything(fields, message):
  with pytest.raises(config_lib.ConfigError, match=message):
    _updates(_model(), _gradient(_model()), **fields)
