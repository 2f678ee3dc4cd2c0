# SPDX-License-Identifier: Apache-2.0
"""Rounded weights and caches against arrays that numpy rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax.models import grouped
from attnres_jax.models import linear
from attnres_jax.models import rounded
from attnres_jax.models.mixers import cache as cache_lib
from tests import tiny_network
from tests.models import numpy_rounding

TOKENS, VOCAB = 9, 16


def _draw(*shape, seed=0):
  rng = np.random.default_rng(seed)
  return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_and_scales(bits):
  """Within half a step everywhere; the largest entry is a code's limit."""
  x = _draw(3, 5, 4) * 10.0 ** np.arange(4, dtype=np.float32)
  x[:, :, 2] = 0
  found = rounded.nearest(jnp.asarray(x), (0, 1), bits)
  limit = 2 ** (bits - 1) - 1
  assert found.codes.dtype == jnp.int8 and found.scale.shape == (1, 1, 4)
  np.testing.assert_array_equal(
    np.abs(found.codes).max((0, 1)), [limit, limit, 0, limit]
  )
  dense = rounded.dense(found, jnp.float32)
  np.testing.assert_allclose(
    dense, numpy_rounding.nearest(x, (0, 1), bits), rtol=1e-6
  )
  step = np.abs(x).max((0, 1)) / limit
  assert (np.abs(dense - x) <= 0.5001 * step).all()


@pytest.mark.parametrize("axes", [1, 2])
def test_a_product(axes):
  x, weight = _draw(2, 3, 4, 6), _draw(*(4, 6)[-axes:], 5, 2, seed=1)
  summed = tuple(range(axes))
  expected = np.tensordot(x, numpy_rounding.nearest(weight, summed), axes)
  weight = rounded.nearest(jnp.asarray(weight), summed)
  found = jax.jit(lambda x: linear.linear(x, weight, axes))(x)
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
  # Products of codes are exact in bfloat16, and so the result is rounded once.
  x = jnp.asarray(x, jnp.bfloat16)
  found = jax.jit(lambda x: linear.linear(x, weight, axes))(x)
  exact = np.tensordot(
    np.asarray(x, np.float64), rounded.dense(weight, jnp.float32), axes
  )
  assert found.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    np.asarray(found, np.float32), exact, rtol=2.0**-8, atol=1e-6
  )


def test_products_of_groups():
  """Groups of no row, and of more rows than a piece has."""
  sizes, x = np.array([3, 0, 80, 1], np.int32), _draw(84, 6)
  weight = _draw(4, 6, 5, seed=1)
  kept = rounded.nearest(jnp.asarray(weight), 1)
  group = np.repeat(np.arange(4), sizes)
  expected = np.einsum(
    "PD,PDF->PF", x, numpy_rounding.nearest(weight, 1)[group]
  )
  found = jax.jit(lambda x: grouped.grouped_linear(x, kept, sizes))(x)
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_any_other_use_is_an_error():
  weight = rounded.nearest(jnp.ones((2, 3)), 0)
  with pytest.raises(TypeError):
    jnp.einsum("TD,DF->TF", jnp.ones((1, 2)), weight)


@pytest.mark.parametrize("mixer,heads", [("attention", 2), ("mla", 1)])
def test_a_rounded_cache(mixer, heads):
  """Is read as an exact cache with the same entries, rounded by numpy."""
  model = tiny_network.model(**tiny_network.KINDS | dict(mixers=(mixer,)))
  tokens = np.random.default_rng(0).integers(0, VOCAB, (2, TOKENS))
  tokens, length_B = tokens.astype(np.int32), jnp.array([6, 4])

  def append(name, model):
    cache = cache_lib.kept_as(model.init_cache(2, TOKENS), name)
    out = model.extend(tokens[:, :6], cache, length_B, context=0)
    return cache_lib.append(cache, out.added)

  @jax.jit
  def extend(model, cache):
    return model.extend(tokens[:, 6:], cache).hidden_BTD

  append = jax.jit(append, static_argnames="name")
  kept, exact = append("int8", model), append("model", model)
  for array in kept.states[mixer].arrays:
    assert array.codes.dtype == jnp.int8
    assert array.scale.shape[2:] == (heads, TOKENS, 1)
  entries = jax.tree.map(
    lambda a: jnp.asarray(numpy_rounding.nearest(np.asarray(a), -1)),
    exact.states,
  )
  found = extend(model, kept)
  expected = extend(model, exact._replace(states=entries))
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
  apart = np.abs(extend(model, exact) - expected).max()
  assert 1e-4 < apart < 0.1
