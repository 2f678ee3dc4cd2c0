# SPDX-License-Identifier: Apache-2.0
"""Schemes of few lines against their equations, token by token."""

import functools

from flax import nnx
import numpy as np
import pytest

from attnres_jax.models import residuals
from tests import tiers
from tests import tiny_network
from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")


def _norm(x, gain=1.0):
  return trunks.rms_norm(x, trunks.EPS) * gain


def _ddl(sublayers, p, x):
  for l, f in enumerate(sublayers):
    c = _norm(x, p.gain[l])
    u = f(c)
    after = np.zeros_like(x)
    for at in np.ndindex(u.shape[:2]):
      k = u[at] / np.sqrt(u[at] @ u[at] + 1e-5**2)
      beta = 2 * trunks.sigmoid(p.beta[l] @ c[at] + p.beta_bias[l])
      v = c[at] @ p.value[l]
      erase = np.eye(len(k)) - beta * np.outer(k, k)
      after[at] = erase @ x[at] + beta * k * v
    x = after
  return x


def _elmo_weights(p):
  weight = np.exp(p.logits)
  return weight / weight.sum()


def _elmo(sublayers, p, h):
  states = [h]
  for f in sublayers:
    states.append(states[-1] + f(states[-1]))
  return sum(w * state for w, state in zip(_elmo_weights(p), states))


def _site(p, l, streams):
  """(factors of each stream in a read, weights of each stream in a write)."""
  m = len(streams)
  gain = [1 + p.gain[l, i] for i in range(m)]
  normed = [_norm(x, g) for x, g in zip(streams, gain)]
  low = sum(normed[i] / m @ p.down[l, i] for i in range(m))
  low = low * trunks.sigmoid(low)
  gates = [trunks.sigmoid(low @ p.up[l, :, i]) for i in range(m)]
  factors = [
    gate * g / np.sqrt(np.mean(x**2, -1, keepdims=True) + trunks.EPS) / m
    for gate, g, x in zip(gates, gain, streams)
  ]
  if l == len(p.weigh):
    return factors, None
  logits = sum(normed[i] / m @ p.weigh[l, i] for i in range(m))
  return factors, np.moveaxis(2 * trunks.sigmoid(logits), -1, 0)[..., None]


def _gated_residual(sublayers, p, embedding):
  streams = [embedding] * p.gain.shape[1]
  for l, f in enumerate(sublayers):
    factors, weights = _site(p, l, streams)
    y = f(sum(c * x for c, x in zip(factors, streams)))
    streams = [x + w * y for w, x in zip(weights, streams)]
  factors, _ = _site(p, len(sublayers), streams)
  return sum(c * x for c, x in zip(factors, streams))


def _highway_gate(p, l, h):
  return trunks.sigmoid(_norm(h) @ p.matrix[l] + p.bias[l])


def _highway(sublayers, p, h):
  for l, f in enumerate(sublayers):
    gate = _highway_gate(p, l, h)
    h = (1 - gate) * h + gate * f(h)
  return h


def _laurel(sublayers, p, h):
  for l, f in enumerate(sublayers):
    h = f(h) + h + h @ p.down[l] @ p.up[l]
  return h


def _scaled(sublayers, p, h):
  for l, f in enumerate(sublayers):
    h = h + p.factor[l] * f(h)
  return h


def _siamesenorm(sublayers, p, embedding):
  a = b = embedding
  for l, f in enumerate(sublayers):
    c = np.sqrt(2 * (l // 2 + 1))
    a = _norm(a, p.post_gain[l])
    y = f(a + _norm(b, p.pre_gain[l]))
    a, b = a + y / c, b + y
  return _norm(a, p.post_gain[-1]) + _norm(b, p.pre_gain[-1])


def _postnorm(alpha):
  def definition(sublayers, p, h):
    for l, f in enumerate(sublayers):
      h = _norm(alpha * h + f(h), p.gain[l])
    return h

  return definition


def _hybridnorm(sublayers, p, x):
  for block in range(len(sublayers) // 2):
    mixer, mlp = sublayers[2 * block : 2 * block + 2]
    y = mixer(x) + x
    n = _norm(y, p.gain[block])
    x = mlp(n) + n
  return x


@pytest.mark.parametrize(
  "name,definition,fields",
  [
    ("ddl", _ddl, {}),
    ("elmo", _elmo, {}),
    ("gated_residual", _gated_residual, dict(streams=4, rank=0)),
    ("gated_residual", _gated_residual, dict(streams=3, rank=2)),
    ("highway", _highway, {}),
    ("laurel_lr", _laurel, dict(rank=3)),
    ("rezero", _scaled, {}),
    ("layerscale", _scaled, {}),
    ("siamesenorm", _siamesenorm, {}),
    ("postnorm", _postnorm(1.0), {}),
    ("deepnorm", _postnorm(5**0.25), {}),
    ("keel", _postnorm(5.0), {}),
    ("hybridnorm", _hybridnorm, dict(num_sublayers=6)),
  ],
)
def test_is_its_definition(name, definition, fields):
  trunks.check(name, definition, **fields)


def _dense(sublayers, p, embedding):
  """h_l = sum_i W_{i->l} v_i, with scalars or matrices."""
  values, used = [embedding], 0
  for f in [*sublayers, lambda h: h]:
    h = np.zeros_like(embedding)
    for v in values:
      w = p.weight[used]
      h = h + (w * v if np.ndim(w) == 0 else v @ w)
      used += 1
    values.append(f(h))
  assert used == len(p.weight)
  return values[-1]


def _dwa(sublayers, p, embedding):
  """X_t = Block_t(Y_{t-1}), and Y_t = sum_j a_{t,j} X_j."""
  outputs, y, used = [embedding], embedding, 0
  for t in range(1, len(sublayers) // 2 + 1):
    y = y + sublayers[2 * t - 2](y)
    y = y + sublayers[2 * t - 1](y)
    outputs.append(y)
    y = np.zeros_like(embedding)
    for output in outputs:
      y = y + p.weight[used] * output
      used += 1
  assert used == len(p.weight)
  return y


def _static(p, l, streams):
  """(alpha, beta, A) of sublayer l, for every token."""
  ones = np.ones(streams[0].shape[:2])
  return [np.multiply.outer(a[l], ones) for a in (p.alpha, p.beta, p.mix)]


def _dynamic(p, l, streams):
  alpha, beta, mix = (a + 0j for a in _static(p, l, streams))
  for i, x in enumerate(streams):
    moved = np.tanh(_norm(x, p.gain[l]) @ p.projection[l])
    alpha[i] += p.scale[l][0] * moved[..., 0]
    beta[i] += p.scale[l][1] * moved[..., -1]
    for j in range(len(streams)):
      mix[i][j] += p.scale[l][0] * moved[..., 1 + j]
  return alpha, beta, mix


def _hyper_connections(coefficients, sublayers, p, embedding):
  coefficients = functools.partial(coefficients, p)
  return trunks.many_streams(sublayers, coefficients, embedding, 3)


STATIC = functools.partial(_hyper_connections, _static)
DYNAMIC = functools.partial(_hyper_connections, _dynamic)


@tiers.parametrize(
  "name,definition,count,fields",
  [
    ("densenet", _dense, 3, {}),
    ("denseformer", _dense, 3, {}),
    ("dwa", _dwa, 6, {}),
    ("static_hyper_connections", STATIC, 4, dict(streams=3, scale=2.0)),
    ("hyper_connections", DYNAMIC, 4, dict(streams=3, scale=2.0)),
  ],
  first=4,
)
def test_is_its_definition_with_its_gradients(name, definition, count, fields):
  trunks.check_gradients(name, definition, count, **fields)


def test_starts():
  """ReZero is the identity; LayerScale's factors depend on depth."""
  start = lambda name: trunks.parameters(trunks.scheme(name, 4, scale=0.0))
  np.testing.assert_array_equal(start("ddl").beta_bias, 0.0)
  elmo = _elmo_weights(start("elmo"))
  np.testing.assert_array_equal(elmo, np.full(5, 0.2))
  h = np.random.default_rng(0).standard_normal(trunks.WIDTH)
  gate = _highway_gate(start("highway"), 0, h)
  np.testing.assert_allclose(gate, 1 / (1 + np.exp(2)), rtol=1e-5)
  layers, embedding = trunks.toy(4, pre_norm=False)
  module = trunks.scheme("rezero", 4, scale=0.0)
  output = trunks.run(layers, module, embedding, scan=False)
  np.testing.assert_array_equal(output, embedding)
  for blocks, factor in ((18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)):
    config = tiny_network.config("layerscale", num_layers=blocks)
    module = residuals.build_residual(config, rngs=nnx.Rngs(params=0))
    np.testing.assert_allclose(module.factor[...], factor)
