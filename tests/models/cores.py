# SPDX-License-Identifier: Apache-2.0
"""What tests of one sublayer's core, a mixer or experts, have in common."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax.models.mixers import cache as cache_lib

apply = jax.jit(lambda module, x_BTD, segments=None: module(x_BTD, segments))


def weights(module):
  """Its parameters by name, in float64."""
  state = nnx.to_pure_dict(nnx.state(module))
  return jax.tree.map(lambda w: np.asarray(w, np.float64), state)


def assert_close(actual, expected, tolerance=1e-5):
  """Equal, up to a fraction of the largest number."""
  scale = np.abs(expected).max()
  np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale)


def chunk(start, length, batch=2):
  """Tokens of equally long rows."""
  both = np.full((2, batch), [[start], [length]], np.int32)
  return cache_lib.Chunk(*map(jnp.asarray, both))


def assert_pieces(extend, module, x_BTD, state, pieces):
  """Tokens in pieces give what all at once give; returns the last state."""
  outputs, start = [], 0
  for length in pieces:
    x, new = x_BTD[:, start : start + length], chunk(start, length, len(x_BTD))
    y, state = extend(module, x, state, new)
    outputs.append(y)
    start += length
  assert start == x_BTD.shape[1]
  assert_close(np.concatenate(outputs, axis=1), apply(module, x_BTD))
  return state


def assert_documents_apart(module, x_BTD, segments_T, definition):
  """Packed documents give what `definition` gives for each of them."""
  batch = len(x_BTD)
  packed = apply(module, x_BTD, jnp.tile(segments_T, (batch, 1)))
  for segment in np.unique(segments_T):
    inside = segments_T == segment
    for b in range(batch):
      expected = definition(module, x_BTD[b, inside])
      assert_close(packed[b, inside], expected)
  assert np.abs(packed - apply(module, x_BTD)).max() > 1e-3


def assert_rounds_activations_only(module, x_BTD, expected, tolerance):
  """In bfloat16; weights and their gradients stay float32."""
  assert x_BTD.dtype == jnp.bfloat16
  narrow = apply(module, x_BTD)
  assert narrow.dtype == jnp.bfloat16
  assert_close(narrow.astype(jnp.float32), expected, tolerance)

  @jax.jit
  @jax.grad
  def gradient(module):
    return jnp.sum(module(x_BTD).astype(jnp.float32))

  for path, leaf in jax.tree.leaves_with_path(gradient(module)):
    assert leaf.dtype == jnp.float32
    # The load of the experts is counted in whole numbers.
    if "selection_bias" not in jax.tree_util.keystr(path):
      assert np.any(leaf != leaf.astype(jnp.bfloat16).astype(jnp.float32))
