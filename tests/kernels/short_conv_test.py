# SPDX-License-Identifier: Apache-2.0
"""short_conv: every backend against the definition in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_kernels import platforms
from attnres_kernels import short_conv
from attnres_kernels.short_conv import pallas_tpu
from tests import tiers

EPS = 1e-6


def oracle(x, taps, tail, ids, unit):
  """Token by token, float64."""
  x, taps, tail = (np.float64(a) for a in (x, taps, tail))
  number = len(taps)
  padded = np.concatenate([tail, x], axis=1)
  ids = np.concatenate([np.repeat(ids[:, :1], number - 1, axis=1), ids], axis=1)
  y = np.zeros_like(x)
  for b, t in np.ndindex(x.shape[:2]):
    z = sum(
      taps[i] * padded[b, t + i] * (ids[b, t + i] == ids[b, t + number - 1])
      for i in range(number)
    )
    y[b, t] = z / (1 + np.exp(-z))
  if unit:
    y /= np.sqrt(np.sum(y**2, axis=-1, keepdims=True) + EPS)
  return y


def make(length, dtype="float32", heads=2, width=128, number=4):
  rng = np.random.default_rng(length)
  normal = lambda *shape: rng.normal(size=shape)
  x = jnp.asarray(normal(2, length, heads, width), dtype)
  taps = jnp.asarray(normal(number, heads, width), jnp.float32)
  dy = jnp.asarray(normal(2, length, heads, width), dtype)
  ids = jnp.asarray(np.sort(rng.integers(0, 5, (2, length))), jnp.int32)
  return x, taps, dy, ids


@functools.partial(jax.jit, static_argnums=(0, 1))
def both(implementation, unit, x, taps, dy, ids, tail=None):
  def f(x, taps):
    return short_conv(
      x, taps, tail=tail, segment_ids=ids, unit_eps=EPS if unit else None,
      implementation=implementation,
    )  # fmt: skip

  y, pull = jax.vjp(f, x, taps)
  return y, *pull(dy)


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("unit", (False, True))
def test_definition(unit, packed):
  x, taps, dy, ids = make(9, heads=1, width=3)
  tail = x[:, :3] + 1
  ids = ids if packed else jnp.zeros_like(ids)
  y, *_ = both("xla", unit, x, taps, dy, ids, tail)
  expected = oracle(x, taps, tail, np.asarray(ids), unit)
  np.testing.assert_allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@tiers.parametrize(
  "unit,packed,width",
  [(False, True, 256), (True, False, 128), (True, True, 256)],
  first=2,
)
def test_kernel(unit, packed, width, dtype, monkeypatch):
  # Three steps in time.
  monkeypatch.setattr(pallas_tpu, "_MOST_TOKENS", 16)
  x, taps, dy, ids = make(48, dtype, width=width)
  arguments = x, taps, dy, ids if packed else None
  with platforms.interpreted():
    kernel = both("pallas_tpu", unit, *arguments)
  exact = both("xla", unit, x.astype("float32"), taps, dy.astype("float32"),
               arguments[3])  # fmt: skip
  plain = both("xla", unit, *arguments)
  for a, b, c in zip(kernel, plain, exact):
    assert a.dtype == b.dtype and a.shape == b.shape
    error = lambda a, c=c: np.abs(np.float64(a) - np.float64(c)).max()
    assert error(a) <= 1.5 * error(b) + 2e-6 * (1 + np.abs(c).max())


def test_a_named_backend_says_why_not():
  x, taps, *_ = make(48)
  call = functools.partial(short_conv, implementation="pallas_tpu")
  with pytest.raises(NotImplementedError, match="no tail"):
    call(x, taps, tail=x[:, :3])
  with pytest.raises(NotImplementedError, match="multiple of 16"):
    call(x[:, :20], taps)
  with pytest.raises(NotImplementedError, match="multiples of 128 wide"):
    call(x[..., :64], taps[..., :64])
