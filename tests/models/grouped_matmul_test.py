# SPDX-License-Identifier: Apache-2.0
"""Products of sorted rows, for each platform, against a loop over groups."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax.common import topology
from attnres_jax.models import grouped_matmul
from attnres_kernels import platforms
from tests import tiers

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
def _products(x, weight, dy, sizes):
  low = weight.astype(x.dtype)
  return (
    grouped_matmul.multiply(x, low, sizes),
    grouped_matmul.multiply(dy, low, sizes, transposed=True),
    grouped_matmul.weight_gradient(x, dy, sizes),
  )


@tiers.parametrize("sizes", SIZES, first=2)
def test_is_its_definition(sizes):
  arguments = _inputs(sizes)
  for actual, expected in zip(_products(*arguments), _definition(*arguments)):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


@tiers.parametrize("sizes", SIZES[1:])
def test_the_route_of_tpu_is_the_same(sizes, monkeypatch):
  """`ragged_dot`, by its definition for any platform, and Pallas kernels."""
  _only_the_kernels(monkeypatch)
  arguments = _inputs(sizes)
  both = jax.jit(lambda *a: _products.__wrapped__(*a))
  with platforms.interpreted():
    all_found = both(*arguments)
  for actual, expected in zip(all_found, _definition(*arguments)):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("on_tpu", [False, True])
def test_adds_to_an_existing_gradient(on_tpu, monkeypatch):
  """Rows behind all groups add nothing."""
  if on_tpu:
    _only_the_kernels(monkeypatch)
  sizes = (150, 0, 64, 65, 0)
  x, weight, dy, sizes = _inputs(sizes)
  behind = lambda a, x: jnp.pad(a, ((0, 9), (0, 0)), constant_values=x)
  with platforms.interpreted():
    add = jax.jit(lambda *a: grouped_matmul.weight_gradient(*a))
    actual = add(behind(x, 1.0), behind(dy, jnp.nan), sizes, weight)
  expected = _definition(x, weight, dy, sizes)[2] + weight
  np.testing.assert_allclose(actual, expected, rtol=0, atol=5e-5)


def _only_the_kernels(monkeypatch):
  def on_tpu(args, default, *, tpu):
    del default
    return tpu(*args)

  monkeypatch.setattr(platforms, "by_platform", on_tpu)


def test_what_is_lowered():
  """Kernels on TPU, loops elsewhere; never all pairs."""
  staged = _products.trace(*_inputs(SIZES[0], "bfloat16"))
  on_tpu = staged.lower(lowering_platforms=("tpu",)).as_text()
  assert on_tpu.count('"chlo.ragged_dot"(') == 1
  assert on_tpu.count("tpu_custom_call") == 2
  elsewhere = staged.lower(lowering_platforms=("cpu",)).as_text()
  assert elsewhere.count("stablehlo.while") == 3
  assert "ragged" not in elsewhere


@pytest.mark.needs("libtpu")
@pytest.mark.parametrize("added", [False, True])
def test_compiled_for_tpu_it_is_the_arithmetic_alone(added):
  """Kernels, whose own counts the compiler adds up, and no dense product."""
  rows, groups, width = 4096, 8, 256
  place = jax.sharding.SingleDeviceSharding(topology.devices("v5e:2x2")[0])
  struct = functools.partial(jax.ShapeDtypeStruct, sharding=place)
  low = struct((rows, width), jnp.bfloat16)
  weight = struct((groups, width, width), jnp.float32)

  def step(x, weight, dy, sizes):
    if added:
      return grouped_matmul.weight_gradient(x, dy, sizes, weight)
    return _products.__wrapped__(x, weight, dy, sizes)

  products = 1 if added else 3
  step = jax.jit(step, donate_argnums=1)
  compiled = step.lower(
    low, weight, low, struct((groups,), jnp.int32)
  ).compile()
  flops = compiled.cost_analysis()["flops"]
  assert flops <= 1.1 * products * 2 * rows * width**2
  text = compiled.as_text()
  assert text.count("tpu_custom_call") >= products
  assert " convolution(" not in text and " dot(" not in text
  # The gradient of rows reads the weights as they are.
  assert f"bf16[{groups},{width},{width}]{{1,2,0" not in text
  if added:  # In place, without a copy.
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 4 * groups * width**2
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes


def test_rows_of_a_tile_waste_little():
  """A group that ends inside of a tile has it computed twice."""
  for rows, groups in ((65536, 64), (40960, 16), (8192, 8), (131072, 16)):
    (size, _, _), missing = grouped_matmul._tiles(rows, 2304, 1024, groups)
    tiles = (rows + missing) // size + groups - 1
    assert tiles * size <= 1.13 * rows, (rows, groups, size)


@pytest.mark.parametrize("depth,width", [(1056, 1168), (528, 1168)])
def test_tiles_of_the_sweep_waste_little(depth, width):
  """A gradient's tiles, of 436M: the last ones are computed in full."""
  (_, *tiles), _ = grouped_matmul._tiles(147456, depth, width, 128)
  computed = math.prod(
    -(-size // tile) * tile for size, tile in zip((depth, width), tiles)
  )
  assert computed <= 1.33 * depth * width
  assert math.prod(tiles) * 4 <= 2**21  # Several are on the core.


def test_bfloat16_rounds_once():
  sizes = (500, 3, 0, 0, 9)
  arguments = _inputs(sizes, "bfloat16")
  narrow = (
    arguments[0], arguments[1].astype("bfloat16"), *arguments[2:]
  )  # fmt: skip
  actual, expected = _products(*arguments), _definition(*narrow)
  assert [a.dtype.name for a in actual] == ["bfloat16", "bfloat16", "float32"]
  for a, b, tolerance in zip(actual, expected, (2**-8, 2**-8, 1e-5)):
    a = a.astype(jnp.float32)
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=1e-5)
