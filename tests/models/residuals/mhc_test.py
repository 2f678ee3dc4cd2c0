# SPDX-License-Identifier: Apache-2.0
"""mHC and mHC-lite against their equations in NumPy loops."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax.models import residuals
from attnres_jax.models.residuals import mhc
from attnres_jax.models.residuals import streams as streams_lib
from tests import tiers
from tests import tiny_network
from tests.models import trunks


def softmax(x):
  return np.exp(x) / np.exp(x).sum()


def sinkhorn(m, z):
  matrix = np.exp(z.reshape(m, m))
  for _ in range(20):
    matrix = matrix / matrix.sum(axis=1, keepdims=True)
    matrix = matrix / matrix.sum(axis=0, keepdims=True)
  return matrix


def permutations(m, z):
  total = 0
  for weight, order in zip(softmax(z), itertools.permutations(range(m))):
    matrix = np.zeros((m, m))
    for i, j in enumerate(order):
      matrix[i, j] = 1
    total = total + weight * matrix
  return total


STREAMS = 3
# name -> (R, its number of logits).
MATRICES = {"mhc": (sinkhorn, 9), "mhc_lite": (permutations, 6)}


def coefficients(name, p, l, streams):
  m, (matrix, columns) = STREAMS, MATRICES[name]
  x = np.concatenate(streams, axis=-1)
  x = trunks.rms_norm(x, trunks.EPS)
  if hasattr(p, "gain"):
    x = x * (1 + p.gain[l].ravel())
  weight = p.projection[l].reshape(-1, p.projection.shape[-1])
  scale = p.scale[l].repeat([m, m, columns])
  z = p.bias[l] + scale * (x @ weight)
  mix = np.zeros((*z.shape[:2], m, m), complex)
  for token in np.ndindex(z.shape[:2]):
    mix[token] = matrix(m, z[token][2 * m :])
  z = np.moveaxis(z, -1, 0)
  read, write = trunks.sigmoid(z[:m]), 2 * trunks.sigmoid(z[m : 2 * m])
  return read, write, mix.transpose(2, 3, 0, 1)


@pytest.mark.usefixtures("float64")
@tiers.parametrize("name", MATRICES, first=["mhc"])
def test_is_its_definition_with_its_gradients(name):
  def definition(sublayers, p, embedding):
    of_site = functools.partial(coefficients, name, p)
    is_mean = name == "mhc"
    return trunks.many_streams(
      sublayers, of_site, embedding, STREAMS, mean=is_mean
    )

  trunks.check_gradients(
    name, definition, 2, rtol=1e-8, streams=STREAMS, scale=2.0
  )


@tiers.parametrize("name", MATRICES, first=["mhc"])
def test_start(name):
  module = _scheme(name)
  streams = module.init(jnp.ones((1, 2, 6)))
  second = jax.tree.map(lambda a: a[1], module)
  values = jax.jit(lambda site, streams: site.coefficients(streams))(
    second, streams
  )
  read, write, mix = (np.asarray(a)[..., 0, 0] for a in values)
  high, low = trunks.sigmoid(1), trunks.sigmoid(-1)
  np.testing.assert_allclose(read, [low, high, low, low], rtol=1e-6)
  np.testing.assert_allclose(write, 2 * read, rtol=1e-6)
  np.testing.assert_allclose(mix.sum(0), 1, rtol=1e-6)
  assert np.abs(mix - np.eye(4)).max() < 8e-3
  if name == "mhc_lite":
    # The identity and the 23 others.
    diagonal = 1 / (1 + 23 * np.exp(-8.0))
    assert mix[0, 0] > diagonal and abs(diagonal - 0.992) < 1e-3
  else:
    start = 1 - 4 * np.exp(-8.0)
    expected = start * np.eye(4) + (1 - start) / 4
    np.testing.assert_allclose(mix, expected, atol=2e-6)


def _scheme(name, **fields):
  config = tiny_network.config(name, width=6, num_heads=1, **fields)
  return residuals.build_residual(config, rngs=None)


def _matrices(name, sigma):
  """R of many tokens with normal logits, [tokens, M, M]."""
  module = _scheme(name)
  rng = np.random.default_rng(0)
  logits = sigma * rng.standard_normal((module.start().size, 1, 500))
  matrices = jax.jit(module.matrix)(jnp.float32(logits))
  matrices = np.asarray(matrices)[:, :, 0]
  return matrices.transpose(2, 0, 1)


@pytest.mark.parametrize("name", MATRICES)
def test_what_each_constraint_means(name):
  for sigma, tolerance in ((1.0, 4e-4), (3.0, 0.06), (8.0, 0.2)):
    matrices = _matrices(name, sigma)
    rows, columns = matrices.sum(2), matrices.sum(1)
    np.testing.assert_allclose(columns, 1, atol=2e-6)
    if name == "mhc":
      # 20 iterations end on columns; rows are only near one.
      assert 0.01 * tolerance < np.abs(rows - 1).max() < tolerance
      continue
    np.testing.assert_allclose(rows, 1, atol=2e-6)
    assert matrices.min() >= 0


def test_backward_repeats_the_iterations():
  shape = jax.ShapeDtypeStruct((16, 2, 3), jnp.float32)
  _, back = jax.eval_shape(lambda z: jax.vjp(mhc.doubly_stochastic, z), shape)
  assert [a.shape for a in jax.tree.leaves(back)] == [(16, 2, 3)]


@pytest.mark.more
def test_streams_in_bfloat16():
  """Sums are float32; what is kept is rounded, once per sublayer."""
  results = []
  for stream_dtype, most in (("float32", 1e-4), ("bfloat16", 2**-8)):
    scheme = _scheme("mhc", stream_dtype=stream_dtype, dtype="float32")
    rng = np.random.default_rng(0)
    draw = lambda *shape, rng=rng: jnp.float32(rng.standard_normal(shape))
    scheme = jax.tree.map(lambda a, f=draw: a + 0.3 * f(*a.shape), scheme)
    values = draw(5, 1, 3, 6)
    results.append(np.float64(trunks.reads(scheme, list(values))))
    carry, slots = scheme.open(scheme.init(values[0]), 0, 4)
    slot = jax.tree.map(lambda a: a[0], slots)
    wide = tuple(x.astype(jnp.float32) for x in carry.streams)
    exact = streams_lib.mixed(carry._replace(streams=wide), values[1])
    for a, b in zip(exact, scheme.write(carry, slot, values[1]).streams):
      assert b.dtype == stream_dtype
      lost = np.max(np.abs((a - b.astype(a.dtype)) / a))
      assert lost < most and (lost > 0 or stream_dtype == "float32")
  wide, narrow = results
  assert 0 < np.abs(wide - narrow).max() < 0.05 * np.abs(wide).max()
