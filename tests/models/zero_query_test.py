# SPDX-License-Identifier: Apache-2.0
"""At initialisation, many schemes are the same function.

One seed gives every scheme the same weights. Behind pre-norms, and with a final
norm, reads that are positive multiples of the residual stream of PreNorm give
the same logits and gradients, up to rounding (and eps, here tiny).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from tests import compare
from tests import tiers
from tests import tiny_network
from tests.models import trunks

FORMS = ("two_phase", "one_softmax")
INPUT_QUERY = config_lib.DepthReadConfig(query="input", query_init=0.1)


def _model(name, **fields):
  return tiny_network.model(name, init_std=0.3, norm_eps=1e-12, **fields)


TOKENS = np.random.default_rng(0).integers(0, 16, (2, 6), dtype=np.int32)


@jax.jit
def _logits_and_gradient(model, tokens):
  def value(model):
    logits = model(tokens)
    return trunks.score(logits), logits

  gradient, logits = jax.grad(value, has_aux=True)(model)
  parts = (gradient.embedding, gradient.sublayers, gradient.final_norm)
  return logits, parts, gradient.residual


@functools.cache
def _prenorm():
  return _logits_and_gradient(_model("prenorm"), TOKENS)


@tiers.parametrize(
  "name,fields",
  [
    ("rescaled", {}),
    ("full_attnres", {}),
    ("block_attnres", dict(block_size=2)),
    ("block_attnres", dict(block_size=3)),
    ("delta_attnres", {}),
    ("densenet", {}),
    ("denseformer", {}),
    ("dwa", {}),
    ("static_hyper_connections", {}),
    ("hyper_connections", {}),
    ("laurel_lr", {}),
    ("mudd", {}),
  ],
  first=["full_attnres", "block_attnres"],
)
def test_transformer_starts_as_its_prenorm_twin(name, fields):
  logits, gradient, _ = _prenorm()
  twin_logits, twin_gradient, _ = _logits_and_gradient(
    _model(name, **fields), TOKENS
  )
  assert jnp.std(logits) > 0.5
  compare.trees(twin_logits, logits, 1e-5)
  if name == "mudd":  # Its keys and values have gains of their own.
    return
  compare.trees(twin_gradient, gradient, 1e-4)
  for leaf in jax.tree.leaves(twin_gradient):
    assert jnp.abs(leaf).max() > 1e-3


@pytest.mark.parametrize("form", FORMS)
@tiers.parametrize(
  "name", ["full_attnres", "block_attnres"], first=["block_attnres"]
)
def test_dead_parameters(name, form):
  """The first sublayer has one source; a gain behind a zero query is idle."""
  model = _model(name, form=form, block_size=3)
  gradient = _logits_and_gradient(model, TOKENS)[2].queries
  np.testing.assert_array_equal(gradient.gain[...], 0.0)
  np.testing.assert_array_equal(gradient.query[0], 0.0)
  assert jnp.abs(gradient.query[1:]).max(axis=1).min() > 1e-4
  query = model.residual.queries.query
  query[...] = jax.random.normal(jax.random.key(1), query.shape)
  gradient = _logits_and_gradient(model, TOKENS)[2].queries
  for leaf in (gradient.gain, gradient.query):
    np.testing.assert_array_equal(leaf[0], 0.0)
    assert jnp.abs(leaf[1:]).max(axis=1).min() > 1e-5


@pytest.mark.parametrize(
  "name,fields",
  [("full_attnres", dict(read=INPUT_QUERY)), ("mhc", {}), ("mrla", {})],
)
def test_same_seed_same_weights_under_every_scheme(name, fields):
  """Also if a scheme draws random numbers, or starts as another function."""
  plain, other = _model("prenorm"), _model(name, **fields)
  for part in ("embedding", "sublayers", "final_norm"):
    compare.trees(getattr(other, part), getattr(plain, part), 0)
