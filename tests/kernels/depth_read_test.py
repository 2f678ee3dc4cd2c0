# SPDX-License-Identifier: Apache-2.0
"""A read and its norm at once, against the reference and against two phases."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_kernels import depth_attention
from attnres_kernels import depth_merge_norm
from attnres_kernels import depth_read_norm
from attnres_kernels import dispatch

WIDTH, LAYERS = 256, 20
BACKENDS = ("xla", "pallas_tpu")


def _arrays(sources, tokens, dtype, scale=1.0):
  rng = np.random.default_rng(0)

  def draw(*shape):
    return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)

  values = [draw(*tokens, WIDTH).astype(dtype) for _ in range(sources)]
  values[-1] = values[-1].astype(jnp.float32)
  return 0.2 * draw(LAYERS, WIDTH), values, draw(WIDTH)


def _read(backend, queries, row, sources, gain, **options):
  @jax.jit
  def read(queries, sources, gain):
    return depth_read_norm(
      queries, row, sources, gain, implementation=backend, **options
    )

  with dispatch.interpreted():
    return read(queries, sources, gain)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
  ("sources", "tokens"), [(9, (1, 1)), (2, (8, 1)), (3, (40, 1)), (1, (3,))]
)
def test_equals_the_reference(backend, sources, tokens):
  queries, values, gain = _arrays(sources, tokens, jnp.float32)
  found = _read(backend, queries, 11, values, gain)
  expected = _read("reference", queries, 11, values, gain)
  np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
  # The row matters, unless there is one source.
  other = _read(backend, queries, 3, values, gain)
  assert (np.abs(other - expected).max() > 0.01) == (sources > 1)


@pytest.mark.parametrize("backend", ("reference", *BACKENDS))
def test_a_source_of_several_terms(backend):
  """It is their float32 sum, whatever their dtypes."""
  queries, values, gain = _arrays(5, (2, 1), jnp.bfloat16)
  first, *terms = values
  total = sum((x.astype(jnp.float32) for x in terms[1:3]), jnp.zeros(()))
  expected = _read(
    backend, queries, 4, [first, terms[0], total, terms[3]], gain
  )
  groups = [first, terms[0], tuple(terms[1:3]), terms[3]]
  found = _read(backend, queries, 4, groups, gain)
  np.testing.assert_array_equal(found, expected)
  apart = _read(backend, queries, 4, values, gain)
  assert np.abs((apart - expected).astype(jnp.float32)).max() > 0.05


@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_two_phases(backend):
  """bfloat16 blocks and a float32 partial sum, as while decoding."""
  queries, (*blocks, partial), gain = _arrays(5, (8, 1), jnp.bfloat16)
  out, lse = depth_attention(queries[2][None], blocks)
  _, expected = depth_merge_norm(
    out[0].astype(jnp.float32), lse[0], queries[2], partial, None, gain
  )
  found = _read(backend, queries, 2, [*blocks, partial], gain)
  assert found.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    found.astype(jnp.float32), expected, rtol=0.02, atol=0.02
  )


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_and_zero_sources(backend):
  queries, values, gain = _arrays(4, (2, 1), jnp.float32, scale=100.0)
  values[1] = jnp.zeros_like(values[1])
  found = _read(backend, 1e4 * queries, 0, values, gain)
  expected = _read("reference", 1e4 * queries, 0, values, gain)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
  assert np.isfinite(found).all()


def test_faults():
  queries, values, gain = _arrays(2, (2, 1), jnp.float32)
  unchecked = inspect.unwrap(depth_read_norm)  # Tests check signatures, too.
  for bad, match in (
    ((queries, LAYERS, values, gain), "row=20 must be from 0 to 19"),
    ((queries[:, 1:], 0, values, gain), r"queries must be \[L, 256\]"),
    ((queries, 0, [], gain), "at least one"),
    ((queries, 0, [values[0], gain], gain), "shapes differ"),
    ((queries, 0, [values[0], ()], gain), "empty tuple"),
    ((queries, 0, [values[0], (gain, gain)], gain), "shapes differ"),
    ((queries, 0, values, gain[1:]), r"gain must be \[256\]"),
  ):
    with pytest.raises(ValueError, match=match):
      unchecked(*bad)
  with pytest.raises(NotImplementedError, match="runs on tpu"):
    jax.jit(
      lambda: depth_read_norm(
        queries, 0, values, gain, implementation="pallas_tpu"
      )
    )()
  many = [jnp.zeros((16, 8192), jnp.float32)] * 60
  with pytest.raises(NotImplementedError, match="60 sources need"):
    depth_read_norm(
      jnp.zeros((1, 8192)), 0, many, jnp.ones(8192),
      implementation="pallas_tpu",
    )  # fmt: skip
