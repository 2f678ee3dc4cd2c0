# SPDX-License-Identifier: Apache-2.0
"""Kernels of experts, in interpret mode, against loops over rows in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_kernels.experts import pallas_tpu
from tests import tiers

HIDDEN, WIDTH = 32, 40
# Rows per expert: even, some empty, all in one, more than a tile.
SIZES = [(40, 40, 40), (0, 7, 0, 300, 1), (0, 0, 260), (129, 1, 127)]


def _units(gate, up):
  return jax.nn.silu(gate) * up


def _inputs(sizes, dtype="float32", behind=5):
  rows, experts = sum(sizes) + behind, len(sizes)
  keys = iter(jax.random.split(jax.random.key(0), 5))
  normal = lambda *shape: jax.random.normal(next(keys), shape)
  x, dy = normal(rows, WIDTH), normal(rows, WIDTH)
  weight = jax.random.uniform(next(keys), (rows,)) + 0.5
  matrices = (
    normal(experts, 2, HIDDEN, WIDTH) * WIDTH**-0.5,
    normal(experts, HIDDEN, WIDTH) * HIDDEN**-0.5,
  )
  x, dy, *matrices = (a.astype(dtype) for a in (x, dy, *matrices))
  return x, weight, jnp.array(sizes, jnp.int32), *matrices, dy


def _definition(x, weight, sizes, gate_and_up, down, dy):
  """Outputs, and the gradients of rows, weights and matrices, row by row."""
  x, weight, gate_and_up, down, dy = (
    np.asarray(a, np.float64) for a in (x, weight, gate_and_up, down, dy)
  )
  y, dx, dweight = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weight)
  dgate_and_up, ddown = np.zeros_like(gate_and_up), np.zeros_like(down)
  for row, e in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
    gate, up = gate_and_up[e] @ x[row]
    sigmoid = 1 / (1 + np.exp(-gate))
    hidden = gate * sigmoid * up
    y[row] = weight[row] * hidden @ down[e]
    dhidden = down[e] @ dy[row]
    dweight[row] = dhidden @ hidden
    ddown[e] += weight[row] * np.outer(hidden, dy[row])
    dgate = dhidden * up * sigmoid * (1 + gate * (1 - sigmoid))
    dboth = weight[row] * np.stack([dgate, dhidden * gate * sigmoid])
    dgate_and_up[e] += dboth[..., None] * x[row]
    dx[row] = np.einsum("gf,gfd->d", dboth, gate_and_up[e])
  return y, dx, dweight, dgate_and_up, ddown


def _run(arguments, *existing):
  options = dict(units=_units, interpret=True)
  forward = functools.partial(pallas_tpu.forward, **options)
  backward = functools.partial(pallas_tpu.backward, **options)
  y = jax.jit(forward)(*arguments[:-1])
  return y, *jax.jit(backward)(*arguments, *existing)


def _assert_close(results, expected, rows, atol):
  for i, (a, b) in enumerate(zip(results, expected, strict=True)):
    if i < 3:  # Rows behind all groups may be anything.
      a, b = a[:rows], b[:rows]
    a = np.asarray(a, np.float64)
    np.testing.assert_allclose(a, b, rtol=0, atol=atol * np.abs(b).max())


@tiers.parametrize("sizes", SIZES, first=2)
def test_is_its_definition(sizes):
  arguments = _inputs(sizes)
  _assert_close(_run(arguments), _definition(*arguments), sum(sizes), 2e-6)


@pytest.mark.parametrize("slices", [1, 2])
def test_adds_to_gradients_that_exist(slices, monkeypatch):
  """Also if hidden units are sliced; rows behind all groups add nothing."""
  monkeypatch.setattr(pallas_tpu, "num_slices", lambda *args: slices)
  x, *rest, dy = _inputs(SIZES[1])
  rows = sum(SIZES[1])
  x, dy = x.at[rows:].set(jnp.inf), dy.at[rows:].set(jnp.nan)
  arguments = x, *rest, dy
  existing = [jnp.full(a.shape, 0.5) for a in arguments[3:5]]
  expected = [
    *_definition(*(a[:rows] if len(a) == len(x) else a for a in arguments))
  ]
  for i in (3, 4):
    expected[i] = expected[i] + 0.5
  _assert_close(_run(arguments, *existing), expected, rows, 2e-6)


def test_bfloat16_rounds_rows_once():
  arguments = _inputs(SIZES[1], "bfloat16")
  results = _run(arguments)
  names = [a.dtype.name for a in results]
  assert names == ["bfloat16"] * 2 + ["float32"] * 3
  _assert_close(results, _definition(*arguments), sum(SIZES[1]), 0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [300, 128, 5])
def test_sums_of_rows(dtype, tokens):
  """Tokens without rows are zero; rows that do not count may be infinite."""
  rng = np.random.default_rng(0)
  token_J = np.sort(rng.integers(0, tokens, 700) // 3 * 3)
  token_J[-20:] = tokens
  rows_JD = jnp.asarray(rng.standard_normal((700, WIDTH)), dtype)
  rows_JD = rows_JD.at[-20:].set(jnp.inf)
  expected = np.zeros((tokens + 1, WIDTH))
  np.add.at(expected, token_J, np.asarray(rows_JD, np.float64))
  add = functools.partial(pallas_tpu.sum_rows, tokens=tokens, interpret=True)
  sums = jax.jit(add)(rows_JD, jnp.asarray(token_J, jnp.int32))
  assert sums.dtype == rows_JD.dtype
  exact = jnp.asarray(expected[:-1], jnp.float32).astype(dtype)
  np.testing.assert_allclose(
    np.asarray(sums, np.float64), np.asarray(exact, np.float64),
    rtol=2**-7 if dtype == "bfloat16" else 1e-6, atol=1e-5,
  )  # fmt: skip


def test_slices_fit_on_the_core():
  """The sweep's experts need one, the 48B network's two."""
  slices = functools.partial(pallas_tpu.num_slices, dtype=jnp.bfloat16)
  assert slices(528, 1168) == 1
  assert slices(1024, 2304) == 2
  assert slices(1000, 8192) is None
