# SPDX-License-Identifier: Apache-2.0
"""Attention in tiles against all pairs at once, and what it keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax.models.mixers import softmax
from tests import jaxprs

BATCH, HEADS, WIDTH, VALUE = 2, 4, 6, 3


def _inputs(length, kv_heads=HEADS, dtype="float32"):
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = ((HEADS, WIDTH), (kv_heads, WIDTH), (kv_heads, VALUE))
  return [
    2 * jax.random.normal(key, (BATCH, length, *shape), dtype)
    for key, shape in zip(keys, shapes)
  ]


def _segments(length):
  first = jnp.arange(length) < length // 3
  second = jnp.arange(length) < length // 2
  return jnp.stack([jnp.where(first, 1, 2), jnp.where(second, 1, 0)])


def _definition(query, key, value, segments):
  """In float64, with a key and a value per query head."""
  query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
  repeats = query.shape[2] // key.shape[2]
  key, value = (np.repeat(x, repeats, axis=2) for x in (key, value))
  logits = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(WIDTH)
  t, s = np.indices(logits.shape[2:])
  mask = np.broadcast_to(s <= t, (BATCH, *t.shape))
  if segments is not None:
    segments = np.asarray(segments)
    mask = mask & (segments[:, :, None] == segments[:, None, :])
  logits = np.where(mask[:, None], logits, -np.inf)
  weight = np.exp(logits - logits.max(-1, keepdims=True))
  weight /= weight.sum(-1, keepdims=True)
  return np.einsum("bnts,bsnv->btnv", weight, value)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
  "length,tile,kv_heads",
  [(1, 4, 4), (8, 8, 4), (21, 4, 4), (16, 2, 2), (9, 4, 1), (7, 5, 4)],
)
def test_is_its_definition(length, tile, kv_heads, packed):
  arrays = _inputs(length, kv_heads)
  segments = _segments(length) if packed else None
  found = jax.jit(softmax.causal_attention, static_argnames="tile")(
    *arrays, segments, tile=tile
  )
  np.testing.assert_allclose(
    found, _definition(*arrays, segments), rtol=0, atol=2e-6
  )


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_do_not_depend_on_the_tile(packed):
  length = 21
  arrays = _inputs(length, 2)
  segments = _segments(length) if packed else None

  def gradients(tile):
    loss = lambda *a: jnp.sum(
      jnp.sin(softmax.causal_attention(*a, segments, tile=tile))
    )
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)

  for a, b in zip(gradients(4), gradients(length)):
    assert np.abs(b).max() > 0.1
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_many_tiles_do_not_add_up_gradients_in_bfloat16():
  """The error of keys and values is that of one rounding of the sum."""
  length = 64
  query, key, value = _inputs(length, 1, "bfloat16")
  # Equal weights: gradients of values are long sums of equal terms.
  query = jnp.zeros_like(query)

  def gradient(tile, *arrays):
    loss = lambda value: jnp.sum(
      softmax.causal_attention(*arrays[:2], value, tile=tile)
      .astype(jnp.float32)
    )  # fmt: skip
    return jax.jit(jax.grad(loss))(arrays[2]).astype(jnp.float32)

  exact = gradient(length, *(x.astype("float32") for x in (query, key, value)))
  error = np.abs(gradient(1, query, key, value) - exact) / np.abs(exact)
  # Weights are rounded, too: each term of a sum by up to 2^-9.
  assert error.max() < 2 * 2**-8


def test_memory_is_linear():
  """No pairs of all tokens; kept are the output and its normalisers."""
  length, tile = 64, 4
  arrays = _inputs(length)
  attend = lambda *a: softmax.causal_attention(*a, kernel="tiled", tile=tile)
  loss = lambda *a: jnp.sum(attend(*a))
  program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)
  largest = max(np.prod(a.shape, dtype=int) for a in jaxprs.arrays(program))
  assert largest <= BATCH * HEADS * length * max(tile, WIDTH)
  kept = [a.shape for a in jaxprs.saved(attend, *arrays)]
  assert sorted(kept) == [
    (BATCH, HEADS, length), (BATCH, length, HEADS, VALUE)
  ]  # fmt: skip
