# SPDX-License-Identifier: Apache-2.0
"""What a traced function keeps; its gradients are those of autodiff."""

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax.models import traced


@jax.jit
def _product(x, w):
  return x @ w


def _function(x, w, shift):
  """Follows cheaply from its product, but for a mean over rows."""
  y = _product(jnp.sin(x), jnp.tanh(w))
  return y * jnp.exp(y + shift), jnp.square(jnp.mean(y, axis=0))


def test_keeps_costly_results_alone():
  rng = np.random.default_rng(0)
  x, w = (jnp.float32(rng.standard_normal(s)) for s in ((8, 5), (5, 7)))
  own, others = (x, w), (jnp.float32(0.3),)
  program = traced.Traced(_function, own, others)
  results, kept = program.forward(own, others)
  expected, pull = jax.vjp(lambda x, w: _function(x, w, *others), *own)
  gradients = jax.tree.map(jnp.ones_like, expected)
  found = program.backward(own, others, kept, gradients)
  for a, b in zip(*map(jax.tree.leaves, (results, expected))):
    np.testing.assert_array_equal(a, b)
  for a, b in zip(found, pull(gradients), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
  # The product and the mean; not sin(x), tanh(w) or exp(y + shift).
  assert sorted(a.shape for a in kept) == [(7,), (8, 7)]


def test_gradients_may_be_of_another_dtype():
  own, others = (jnp.ones(3, jnp.bfloat16),), ()
  program = traced.Traced(lambda x: x * x, own, others)
  _, kept = program.forward(own, others)
  (found,) = program.backward(own, others, kept, jnp.ones(3, jnp.float32))
  assert not kept
  assert found.dtype == jnp.bfloat16
  np.testing.assert_array_equal(np.float32(found), 2)
