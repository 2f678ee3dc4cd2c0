# SPDX-License-Identifier: Apache-2.0
"""Muon against its definition in float64, and known properties."""

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.optimizer import muon


def _gaussian(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape)


def orthogonal(g, iterations=5):
  """Newton-Schulz as in Moonlight, float64, one matrix."""
  tall = g.shape[0] > g.shape[1]
  x = g.T if tall else g
  x = x / (np.linalg.norm(x) + 1e-7)
  for _ in range(iterations):
    a = x @ x.T
    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
  return x.T if tall else x


def _orthogonalise(g, iterations=5):
  return np.asarray(muon.orthogonalise(jnp.float32(g), iterations), np.float64)


def _rms(x):
  return np.sqrt(np.mean(np.square(x)))


class TestOrthogonalise:
  def test_size_of_the_gradient_does_not_matter(self):
    g = _gaussian(8, 32)
    expected = _orthogonalise(g)
    for factor in (2.0**-10, 2.0**40):
      actual = _orthogonalise(factor * g)
      assert _rms(actual - expected) < 0.04 * _rms(expected)

  def test_zero_stays_zero(self):
    np.testing.assert_array_equal(_orthogonalise(np.zeros((4, 8))), 0.0)


AXES = {"weights": "D|F", "layers": "D|F", "experts": "E|D|F",
        "heads_in": "D|NH", "heads_out": "NH|D"}  # fmt: skip
SIZES = {
  "weights": (12, 48),
  "layers": (2, 12, 48),
  "experts": (2, 3, 12, 48),
  "heads_in": (2, 12, 4, 16),
  "heads_out": (2, 4, 16, 12),
}


def _params(arrays):
  return {
    name: nnx.Param(jnp.asarray(x, jnp.float32), axes=AXES[name])
    for name, x in arrays.items()
  }


def _matrices(name, x):
  """The separate matrices of a parameter, as a list, by hand."""
  if name == "weights":
    return [x]
  if name == "experts":
    return [x[i, j] for i in range(2) for j in range(3)]
  if name == "heads_in":
    return [x[i].reshape(12, 64) for i in range(2)]
  if name == "heads_out":
    return [x[i].reshape(64, 12) for i in range(2)]
  return [x[i] for i in range(2)]


def test_steps_with_momentum_against_definition():
  transform = muon.scale_by_muon(0.9, 5, 0.2)
  params = _params({name: np.zeros(size) for name, size in SIZES.items()})
  state = transform.init(params)
  buffers = {name: 0.0 for name in SIZES}
  update = jax.jit(transform.update)
  for step in range(3):
    g = {n: _gaussian(*size, seed=step) for n, size in SIZES.items()}
    updates, state = update(_params(g), state)
    for name in SIZES:
      buffers[name] = 0.9 * buffers[name] + g[name]
      nesterov = g[name] + 0.9 * buffers[name]
      assert updates[name].shape == SIZES[name]
      for taken, matrix in zip(
        _matrices(name, np.asarray(updates[name][...])),
        _matrices(name, nesterov),
      ):
        expected = 0.2 * np.sqrt(max(matrix.shape)) * orthogonal(matrix)
        assert _rms(taken - expected) < 0.04 * _rms(expected)
        # Long matrices of full rank: about 0.2, as AdamW's.
        assert 0.17 < _rms(taken) < 0.2


@pytest.mark.parametrize("axes,ndim", [("D|NH", 2), ("E|D|F", 2)])
def test_axes_that_do_not_fit(axes, ndim):
  with pytest.raises(ValueError, match=r"axes '.*' do not fit .* shape"):
    muon.as_matrices(np.zeros((2,) * ndim), axes)


def test_matrices_cut_over_devices():
  """Heads over two devices and rows over four: the same updates."""
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1, fsdp=4, tensor=2))
  cut = NamedSharding(
    mesh, PartitionSpec(None, sharding.FSDP, sharding.TENSOR, None)
  )
  g = _params({"heads_in": _gaussian(2, 16, 4, 8)})
  transform = muon.scale_by_muon(0.9, 5, 0.2)

  @jax.jit
  def first_update(g):
    return transform.update(g, transform.init(g))[0]["heads_in"][...]

  plain = first_update(g)
  sharded = first_update(jax.device_put(g, cut))
  assert len(sharded.sharding.device_set) == 8
  assert _rms(np.asarray(sharded) - np.asarray(plain)) < 0.04 * _rms(plain)
