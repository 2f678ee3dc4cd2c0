# SPDX-License-Identifier: Apache-2.0
"""MUDD against its equations in NumPy, with mixers of three inputs."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax.models.residuals import base
from tests.models import trunks

L = 4  # two blocks


def _weights(scheme):
  """W_1, W_2 and a_t of every block, cut out of the flat parameters."""
  first, second, bias = (
    np.asarray(p) for p in (scheme.first, scheme.second, scheme.bias)
  )
  weights = []
  for t in range(1, L // 2 + 1):
    ways, hidden = (1, 4 * (t + 1)) if t == L // 2 else (4, 4 * (t + 1))
    outs = ways * (t + 1)
    weights.append((
      first[:hidden].T,
      second[: hidden * outs].reshape(hidden, outs),
      bias[:outs],
      ways,
    ))  # fmt: skip
    first, second, bias = first[hidden:], second[hidden * outs :], bias[outs:]
  assert not (first.size or second.size or bias.size)
  return weights


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
  norm = trunks.fused_norm(jnp.asarray(gain))

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
