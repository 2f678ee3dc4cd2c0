# SPDX-License-Identifier: Apache-2.0
"""MRLA against loops over layers, heads, channels and taps, in NumPy."""

from flax import nnx
import jax
import numpy as np
import pytest
from scipy import special

from attnres_jax.models.residuals import mrla
from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")

HEAD = 2  # gcd(16, 6)


def _over_channels(x, taps):
  """One filter slides over the channels; zeros outside."""
  middle, out = len(taps) // 2, np.zeros_like(x)
  for d in range(x.shape[-1]):
    for j, tap in enumerate(taps):
      if 0 <= d + j - middle < x.shape[-1]:
        out[..., d] += tap * x[..., d + j - middle]
  return out


def _over_tokens(x, taps):
  """The last tap is of the token itself."""
  out = np.zeros_like(x)
  for t in range(x.shape[1]):
    for back in range(min(3, t + 1)):
      out[:, t] += taps[2 - back] * x[:, t - back]
  return out


def _heads(x):
  return np.split(x, x.shape[-1] // HEAD, axis=-1)


def _dot(q, k):
  return np.sum(q * k, axis=-1, keepdims=True)


def _base(sublayers, parameters, embedding, period=4):
  p = parameters.projections
  x, outputs = embedding, []
  for t in range(len(sublayers) // 2):
    x = x + sublayers[2 * t](x)
    x = x + sublayers[2 * t + 1](x)
    outputs.append(x)
    group = range(t - t % period, t + 1)
    query = _heads(_over_channels(x, p.query[t]))
    heads = []
    for h, q in enumerate(query):
      score = np.stack([
        _dot(q, _heads(_over_channels(outputs[s], p.key[s]))[h]) / HEAD**0.5
        for s in group
      ])  # fmt: skip
      weight = special.softmax(score, axis=0)
      values = [_heads(_over_tokens(outputs[s], p.value[s]))[h] for s in group]
      heads.append(sum(w * v for w, v in zip(weight, values)))
    x = x + np.concatenate(heads, axis=-1)
  return x


def _light(sublayers, parameters, embedding):
  p, decay = parameters.projections, parameters.decay
  x, running = embedding, np.zeros_like(embedding)
  for t in range(len(sublayers) // 2):
    x = x + sublayers[2 * t](x)
    x = x + sublayers[2 * t + 1](x)
    heads = [
      trunks.sigmoid(_dot(q, k) / HEAD**0.5) * v
      for q, k, v in zip(
        _heads(_over_channels(x, p.query[t])),
        _heads(_over_channels(x, p.key[t])),
        _heads(_over_tokens(x, p.value[t])),
      )
    ]
    running = decay[t] * running + np.concatenate(heads, axis=-1)
    x = x + running
  return x


def _linear(sublayers, parameters, embedding):
  p = parameters.projections
  values = [embedding]
  for f in [*sublayers, lambda h: h]:
    h = embedding
    for i in range(1, len(values)):
      last = len(values) - 1
      query = _heads(
        trunks.sigmoid(_over_channels(values[last], p.query[last - 1]))
      )
      key = _heads(trunks.sigmoid(_over_channels(values[i], p.key[i - 1])))
      value = _heads(_over_tokens(values[i], p.value[i - 1]))
      parts = [_dot(q, k) * v for q, k, v in zip(query, key, value)]
      h = h + np.concatenate(parts, axis=-1)
    values.append(f(h))
  return values[-1]


@pytest.mark.parametrize(
  "name,definition,count",
  [
    ("mrla", _base, 10),  # The fifth block starts a new history.
    ("mrla_light", _light, 6),
    ("mrla_linear", _linear, 3),
  ],
)
def test_definition(name, definition, count):
  trunks.check(name, definition, count)


@pytest.mark.parametrize(
  "width,taps", [(6, 1), (64, 3), (128, 5), (1024, 5), (2048, 7)]
)
def test_taps_over_channels(width, taps):
  """int((log2 D + 1) / 2), or the next odd number."""
  with jax.enable_x64(False):
    module = jax.eval_shape(
      lambda: mrla.Projections(1, width, nnx.Rngs(params=0))
    )
  assert module.query.shape == (1, taps)
