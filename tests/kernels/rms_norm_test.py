# SPDX-License-Identifier: Apache-2.0
"""rms_norm: every backend against the definition in NumPy."""

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_kernels import platforms
from attnres_kernels import rms_norm
from tests import tiers

EPS = 0.3  # Large enough to matter.


def make(shape, dtype):
  rng = np.random.default_rng(len(shape) + shape[-1])
  x, dy = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
  gain = jnp.asarray(rng.normal(size=shape[-1]), jnp.float32)
  return x, gain, dy


def oracle(x, gain, dy, eps=EPS):
  """The norm and its gradients in float64, by the matrix of derivatives."""
  x, gain, dy = (np.asarray(a, np.float64) for a in (x, gain, dy))
  width = x.shape[-1]
  rows, drows = x.reshape(-1, width), dy.reshape(-1, width)
  y, dx = np.empty_like(rows), np.empty_like(rows)
  dgain = np.zeros(width)
  for i, (row, drow) in enumerate(zip(rows, drows)):
    rms = np.sqrt(np.mean(row**2) + eps)
    y[i] = row / rms * gain
    matrix = np.eye(width) / rms - np.outer(row, row) / (width * rms**3)
    dx[i] = matrix @ (gain * drow)
    dgain += drow * row / rms
  return y.reshape(x.shape), dx.reshape(x.shape), dgain


def run(implementation, x, gain, dy, eps=EPS):
  @jax.jit
  def f(x, gain, dy):
    norm = lambda *a: rms_norm(*a, eps=eps, implementation=implementation)
    y, pull = jax.vjp(norm, x, gain)
    return y, *pull(dy)

  with platforms.interpreted(pltpu.InterpretParams(detect_races=True)):
    return f(x, gain, dy)


@pytest.mark.parametrize("implementation", ("xla", "pallas_tpu"))
@tiers.parametrize(
  "shape,eps",
  [((2, 12, 256), EPS), ((5, 130), EPS), ((5, 130), 0.0), ((300, 128), EPS)],
  first=3,
)
def test_values_and_gradients(implementation, shape, eps):
  """Rows that do not fill a tile, and columns that do not fill registers.

  Without eps, rows of padding, which are zero, add nothing to the gain's
  gradient.
  """
  arrays = make(shape, "float32")
  actual = run(implementation, *arrays, eps=eps)
  for a, b in zip(actual, oracle(*arrays, eps=eps), strict=True):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * np.abs(b).max())


@pytest.mark.parametrize("implementation", ("xla", "pallas_tpu"))
def test_bfloat16_is_rounded_once(implementation):
  arrays = make((40, 256), "bfloat16")
  actual = run(implementation, *arrays)
  expected = oracle(*arrays)
  assert [str(a.dtype) for a in actual] == ["bfloat16", "bfloat16", "float32"]
  for a, b in zip(actual[:2], expected[:2]):
    a = np.asarray(a, np.float64)
    np.testing.assert_allclose(a, b, rtol=2.0**-8, atol=1e-5)
  np.testing.assert_allclose(actual[2], expected[2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", ("xla", "pallas_tpu"))
@tiers.parametrize("tokens", [(2, 20), (1100,)], ids=str, first=[(2, 20)])
def test_gated_heads(implementation, tokens):
  """Times sigmoid(gate), by the norm of each head."""
  x, gain, dy = make((*tokens, 2, 128), "float32")
  gate = x[::-1] - 0.5

  @jax.jit
  def f(x, gain, gate, dy):
    norm = lambda *a: rms_norm(*a, eps=EPS, implementation=implementation)
    y, pull = jax.vjp(norm, x, gain, gate)
    return y, *pull(dy)

  with platforms.interpreted():
    actual = f(x, gain, gate, dy)
  open_ = 1 / (1 + np.exp(-np.asarray(gate, np.float64)))
  dnormed = open_ * np.asarray(dy, np.float64)
  normed, dx, dgain = oracle(x, gain, dnormed)
  dgate = normed * np.asarray(dy, np.float64) * open_ * (1 - open_)
  for a, b in zip(actual, (open_ * normed, dx, dgain, dgate), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * np.abs(b).max())


def test_float64():
  with jax.enable_x64(True):
    x, gain, dy = (jnp.asarray(a, jnp.float64) for a in make((3, 7), "float32"))
    actual = run(None, x, gain, dy)
    for a, b in zip(actual, oracle(x, gain, dy), strict=True):
      np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


@pytest.mark.usefixtures("any_arguments")
def test_bad_arguments():
  x, gain, _ = make((4, 8), "float32")
  with pytest.raises(ValueError, match=r"gain must be \(8,\), got \(7,\)"):
    rms_norm(x, gain[:7])
  with pytest.raises(ValueError, match=r"gate must be \(4, 8\), got \(8,\)"):
    rms_norm(x, gain, x[0])
  with pytest.raises(NotImplementedError, match="multiples of 128 wide, got"):
    rms_norm(x, gain, x, implementation="pallas_tpu")
  with pytest.raises(ValueError, match="eps=-1 must be"):
    rms_norm(x, gain, eps=-1)
  with pytest.raises(NotImplementedError, match="bfloat16 or float32, got flo"):
    rms_norm(x.astype(jnp.float16), gain, implementation="pallas_tpu")
  with pytest.raises(NotImplementedError, match="no pallas_gpu backend"):
    rms_norm(x, gain, implementation="pallas_gpu")
