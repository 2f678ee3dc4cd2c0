# SPDX-License-Identifier: Apache-2.0
"""MUDD against its equations in NumPy, with mixers of three inputs."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import analysis
from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.models.residuals import base
from tests.analysis import networks
from tests.models import trunks

L = 4  # two blocks


@pytest.fixture
def float64():
  with jax.enable_x64(True):
    yield


def _weights(scheme):
  """W_1, W_2 and a_t of every block, cut out of the flat parameters."""
  first, second, bias = (
    np.asarray(p) for p in (scheme.first, scheme.second, scheme.bias)
  )
  found = []
  for t in range(1, L // 2 + 1):
    ways, hidden = (1, 4 * (t + 1)) if t == L // 2 else (4, 4 * (t + 1))
    outs = ways * (t + 1)
    found.append((
      first[:hidden].T,
      second[: hidden * outs].reshape(hidden, outs),
      bias[:outs],
      ways,
    ))  # fmt: skip
    first, second, bias = first[hidden:], second[hidden * outs :], bias[outs:]
  assert not (first.size or second.size or bias.size)
  return found


_erf = np.vectorize(math.erf)


def _gelu(x):
  return 0.5 * x * (1 + _erf(x / 2**0.5))


def _mixtures(weights, outputs):
  first, second, bias, ways = weights
  x = trunks.rms_norm(outputs[-1], trunks.EPS)
  a = _gelu(x @ first) @ second + bias
  a = a.reshape(*a.shape[:2], ways, len(outputs))
  return [
    sum(a[..., c, j, None] * outputs[j] for j in range(len(outputs)))
    for c in range(ways)
  ]


def _mixer(q, k, v):
  """Not symmetric in its inputs."""
  return (q * k).sum(axis=-1, keepdims=True) * v + q


def _mlp(x):
  return 1.0 / (1.0 + x * x)


def _network(scheme, norm_gain, embedding):
  norm = lambda x, gain: trunks.rms_norm(x, trunks.EPS) * gain
  outputs, weights = [embedding], _weights(scheme)
  x = embedding
  q = k = v = norm(x, norm_gain)
  for t in range(1, L // 2 + 1):
    x = x + _mixer(q, k, v)
    x = x + _mlp(norm(x, norm_gain))
    outputs.append(x)
    *ways, x = _mixtures(weights[t - 1], outputs)
    if ways:
      gains = norm_gain, scheme.key_gain[t - 1], scheme.value_gain[t - 1]
      q, k, v = (norm(w, np.asarray(g)) for w, g in zip(ways, gains))
  return x


def test_definition(float64):
  _, embedding = trunks.toy(1)
  scheme = trunks.scheme("mudd", L)
  gain = np.linspace(0.5, 1.5, trunks.WIDTH)
  norm = trunks.ToyNorm(jnp.asarray(gain), trunks.EPS)

  def sublayer(l, carry, slot):
    x = scheme.read(carry, slot, norm)[0]
    if l % 2:
      return _mlp(base.query_input(x))
    # Three inputs from the second block on.
    assert isinstance(x, base.QKV) == (l > 0)
    return _mixer(*base.qkv(x))

  @jax.jit
  def run(embedding):
    return scheme.readout(base.run_through(scheme, embedding, sublayer))

  got = run(embedding)
  want = _network(scheme, gain, np.asarray(embedding))
  np.testing.assert_allclose(got, want, rtol=1e-11)


def test_number_of_parameters(float64):
  D, scheme = trunks.WIDTH, trunks.scheme("mudd", L)
  expected = {
    "first": (8 + 12) * D,
    "second": 8 * 8 + 12 * 3,
    "bias": 8 + 3,
    "key_gain": D,
    "value_gain": D,
  }
  sizes = {name: getattr(scheme, name).size for name in expected}
  assert sizes == expected
  assert sum(a.size for a in jax.tree.leaves(scheme)) == sum(expected.values())
  with pytest.raises(config_lib.ConfigError, match="num_layers.*got 1.*mudd"):
    trunks.scheme("mudd", 2)


CONFIG = config_lib.ModelConfig(
  vocab_size=19, width=16, num_layers=2, num_heads=2, mlp_width=24, init_std=0.3
)


def _model(name):
  residual = config_lib.ResidualConfig(name=name)
  return models.build_model(
    dataclasses.replace(CONFIG, residual=residual), seed=3
  )


def test_starts_as_prenorm():
  tokens = networks.tokens(2, 5)
  logits = [
    np.asarray(jax.jit(lambda m, t: m(t))(_model(name), tokens))
    for name in ("mudd", "prenorm")
  ]
  assert logits[0].std() > 0.3
  np.testing.assert_allclose(*logits, atol=1e-5)


def test_mixing_matrix_is_the_product_of_the_mixtures():
  model, token = networks.network("mudd", num_layers=2), networks.tokens(1, 1)
  matrix = analysis.mixing_matrix(model, token, include_output=True)
  trace = networks.trace(model, token)
  # Unroll: outputs of blocks, and reads, as combinations of the values.
  values, rows = np.eye(L + 1), []
  weights = jax.jit(model.residual.weights)
  outputs, stream = [values[0]], values[0]
  reads = values[0]
  for t in range(1, L // 2 + 1):
    rows += [reads, stream + values[2 * t - 1]]
    stream = stream + values[2 * t - 1] + values[2 * t]
    outputs.append(stream)
    outputs_BTD = [
      sum(c * np.asarray(v) for c, v in zip(x, trace.values)) for x in outputs
    ]
    a = np.asarray(weights(tuple(outputs_BTD)))
    mixed = [sum(w[j, 0, 0] * outputs[j] for j in range(t + 1)) for w in a]
    reads, stream = mixed[0], mixed[-1]
  rows.append(stream)
  np.testing.assert_allclose(matrix, rows, atol=2e-4)
