# SPDX-License-Identifier: Apache-2.0
"""The tiled cross-entropy against its definition in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax.models import loss
from tests import jaxprs

BATCH, LENGTH, WIDTH, VOCAB = 3, 10, 5, 11


def _inputs(seed=0):
  rng = np.random.default_rng(seed)
  h = rng.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
  head = rng.standard_normal((WIDTH, VOCAB)).astype(np.float32)
  target = rng.integers(0, VOCAB, (BATCH, LENGTH), dtype=np.int32)
  weight = rng.integers(0, 3, (BATCH, LENGTH)).astype(np.float32) / 2
  return h, head, target, weight


def _definition(h, head, target, weight, soft_cap=0.0, z_loss=0.0):
  """(total, nll, z) and the gradients of total by h and head, float64."""
  h, head, weight = (np.asarray(a, np.float64) for a in (h, head, weight))
  raw = h @ head
  logits = soft_cap * np.tanh(raw / soft_cap) if soft_cap else raw
  log_normaliser = np.log(np.sum(np.exp(logits), axis=-1))
  onehot = np.eye(head.shape[1])[target]
  nll = np.sum(weight * (log_normaliser - np.sum(onehot * logits, -1)))
  z = np.sum(weight * log_normaliser**2)
  p = np.exp(logits - log_normaliser[..., None])
  d = (1 + 2 * z_loss * log_normaliser[..., None]) * p - onehot
  d *= weight[..., None]
  if soft_cap:
    d *= 1 - np.tanh(raw / soft_cap) ** 2
  d_h = d @ head.T
  d_head = np.einsum("btd,btv->dv", h, d)
  return (nll + z_loss * z, nll, z), (d_h, d_head)


@functools.partial(jax.jit, static_argnums=4)
def _sums_and_gradients(h, head, target, weight, options):
  def total(h, head):
    sums = loss.cross_entropy(h, head, target, weight, **dict(options))
    return sums.total, sums

  gradients, sums = jax.grad(total, argnums=(0, 1), has_aux=True)(h, head)
  plain = loss.cross_entropy(h, head, target, weight, **dict(options))
  return sums, plain, gradients


@pytest.mark.parametrize("extra", [{}, dict(soft_cap=1.5, z_loss=0.1)])
# Tokens of all rows per tile: one position, four (remainder 2), all.
@pytest.mark.parametrize("tile_tokens", [1, 12, 15, 30, 1000, 0])
def test_definition(tile_tokens, extra):
  inputs = _inputs()
  expected, expected_gradients = _definition(*inputs, **extra)
  options = tuple((extra | dict(tile_tokens=tile_tokens)).items())
  sums, plain, gradients = _sums_and_gradients(*inputs, options)
  np.testing.assert_allclose(sums, expected, rtol=1e-6)
  np.testing.assert_allclose(plain, expected, rtol=1e-6)
  for a, b in zip(gradients, expected_gradients):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * (1 + abs(b).max()))


def test_gradient_scales_with_what_follows():
  h, head, target, weight = _inputs()

  def tripled(h):
    return 3.0 * loss.cross_entropy(h, head, target, weight).total

  expected = 3 * _definition(h, head, target, weight)[1][0]
  actual = jax.grad(tripled)(h)
  np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("low", [False, True], ids=["large", "small"])
@pytest.mark.parametrize("tile_tokens", [12, 0])
def test_sums_that_need_a_shift(tile_tokens, low):
  """The largest power of e in a row is above 1e38, or all are below 1e-38."""
  h, head, target, weight = _inputs()
  h, head = 12 * h, 6 * head
  if low:  # One coordinate lowers all logits of three tokens.
    h[:, :1] = 0
    h[:, :1, 0], head[0] = 100, -2 + head[0] / 100
  options = (("tile_tokens", tile_tokens), ("z_loss", 0.01))
  expected, expected_gradients = _definition(
    h, head, target, weight, z_loss=0.01
  )
  logits = np.einsum("btd,dv->btv", h, head)
  assert logits.max(-1).min() < -90 if low else logits.max() > 200
  sums, plain, gradients = _sums_and_gradients(h, head, target, weight, options)
  np.testing.assert_allclose(sums, expected, rtol=1e-6)
  np.testing.assert_allclose(plain, expected, rtol=1e-6)
  for a, b in zip(gradients, expected_gradients):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * abs(b).max())


@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
def test_the_target_of_a_gpu(soft_cap):
  """The logits of the targets as sums of their own, on any platform."""
  h, head, target, _ = _inputs()
  of = lambda form: loss._raise_on(form, soft_cap, h, head, target)
  for a, b in zip(of(loss._target_of_column), of(loss._target_of_row)):
    np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def test_a_sure_prediction_keeps_its_gradient():
  """In bfloat16, where the share of the target rounds to one."""
  h = jnp.full((1, 1, 1), 7.0, jnp.bfloat16)
  head = jnp.asarray([[1.0, 0.0, 0.0]])
  target, weight = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1))
  _, _, (d_h, d_head) = _sums_and_gradients(h, head, target, weight, ())
  _, expected = _definition(h, head, target, weight)
  np.testing.assert_allclose(d_head, expected[1], rtol=0.01)
  np.testing.assert_allclose(d_h.astype(jnp.float32), expected[0], rtol=0.01)


def test_bfloat16_states_give_float32_sums():
  h, head, target, weight = _inputs()
  half = jnp.asarray(h, jnp.bfloat16)
  sums, _, (d_h, d_head) = _sums_and_gradients(half, head, target, weight, ())
  assert {a.dtype for a in sums} == {jnp.dtype("float32")}
  assert d_h.dtype == jnp.bfloat16 and d_head.dtype == jnp.float32
  expected, gradients = _definition(half, head, target, weight)
  np.testing.assert_allclose(sums, expected, rtol=1e-2)
  np.testing.assert_allclose(d_head, gradients[1], rtol=0, atol=0.1)


def _largest(vocab, batch, length, **options):
  """Elements of the largest array with a vocabulary axis and no width axis."""

  def total(h, head, target, weight):
    return loss.cross_entropy(h, head, target, weight, **options).total

  shapes = [
    jax.ShapeDtypeStruct((batch, length, 4), jnp.bfloat16),
    jax.ShapeDtypeStruct((4, vocab), jnp.float32),
    jax.ShapeDtypeStruct((batch, length), jnp.int32),
    jax.ShapeDtypeStruct((batch, length), jnp.float32),
  ]
  jaxpr = jax.make_jaxpr(jax.value_and_grad(total, argnums=(0, 1)))(*shapes)
  sizes = [
    a.size
    for a in jaxprs.arrays(jaxpr)
    if vocab in a.shape and a.shape not in ((4, vocab), (vocab, 4))
  ]
  return max(sizes)


def test_only_a_tile_of_logits_exists():
  # 1009 is no product of the other axes.
  assert _largest(1009, 2, 64, tile_tokens=16) == 16 * 1009
  assert _largest(1009, 2, 64, tile_tokens=128) == 128 * 1009
  assert _largest(1009, 2, 64) == 128 * 1009  # all of it fits
  # By default 64 MiB of float32 per device, or 4096 tokens if that is more.
  assert 4 * _largest(2048, 4, 4096) == loss.TILE_BYTES == 2**26
  assert _largest(163_840, 4, 2048) == 4096 * 163_840
