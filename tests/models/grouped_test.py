# SPDX-License-Identifier: Apache-2.0
"""Products of sorted rows, for each platform, against a loop over groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax.models import grouped

GROUPS, IN, OUT = 5, 6, 4
# Rows per group: even, some or most of them empty, all in one, larger and
# smaller than a piece of the loop.
SIZES = [
  (8, 8, 8, 8, 8),
  (0, 7, 0, 20, 0),
  (0, 0, 0, 0, 3),
  (150, 1, 64, 65, 0),
]


def _inputs(sizes, dtype="float32"):
  keys = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(keys[0], (sum(sizes), IN)).astype(dtype)
  weight = jax.random.normal(keys[1], (GROUPS, IN, OUT))
  dy = jax.random.normal(keys[2], (sum(sizes), OUT)).astype(dtype)
  return x, weight, dy, jnp.array(sizes, jnp.int32)


def _definition(x, weight, dy, sizes):
  """The product and both gradients in float64."""
  x, weight, dy = (np.asarray(a, np.float64) for a in (x, weight, dy))
  y, dx, dweight = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(weight.shape)
  stop = 0
  for group, size in enumerate(np.asarray(sizes)):
    rows = slice(stop, stop + size)
    stop += size
    y[rows] = x[rows] @ weight[group]
    dx[rows] = dy[rows] @ weight[group].T
    dweight[group] = x[rows].T @ dy[rows]
  return y, dx, dweight


@jax.jit
def _both(x, weight, dy, sizes):
  y, pull = jax.vjp(lambda *a: grouped.grouped_linear(*a, sizes), x, weight)
  return y, *pull(dy)


@pytest.mark.parametrize("sizes", SIZES)
def test_is_its_definition(sizes):
  arguments = _inputs(sizes)
  for found, expected in zip(_both(*arguments), _definition(*arguments)):
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("sizes", SIZES[1:])
def test_the_route_of_tpu_is_the_same(sizes, monkeypatch):
  """`ragged_dot` instead of the loop, as defined for any platform."""

  def on_tpu(ragged, looped, *operands):
    del looped
    return ragged(*operands)

  monkeypatch.setattr(grouped, "_on_platform", on_tpu)
  arguments = _inputs(sizes)
  both = jax.jit(lambda *a: _both.__wrapped__(*a))
  for found, expected in zip(both(*arguments), _definition(*arguments)):
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_what_is_lowered():
  """Kernels on TPU, loops elsewhere; never all pairs."""
  traced = _both.trace(*_inputs(SIZES[0], "bfloat16"))
  on_tpu = traced.lower(lowering_platforms=("tpu",)).as_text()
  assert on_tpu.count('"chlo.ragged_dot"(') == 3 and "while" not in on_tpu
  elsewhere = traced.lower(lowering_platforms=("cpu",)).as_text()
  assert elsewhere.count("stablehlo.while") == 3
  assert "ragged" not in elsewhere


def test_bfloat16_rounds_once():
  sizes = (500, 3, 0, 0, 9)
  arguments = _inputs(sizes, "bfloat16")
  rounded = (
    arguments[0], arguments[1].astype("bfloat16"), *arguments[2:]
  )  # fmt: skip
  found, expected = _both(*arguments), _definition(*rounded)
  assert [a.dtype.name for a in found] == ["bfloat16", "bfloat16", "float32"]
  for a, b, tolerance in zip(found, expected, (2**-8, 2**-8, 1e-5)):
    a = a.astype(jnp.float32)
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=1e-5)
