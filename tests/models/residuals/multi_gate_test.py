# SPDX-License-Identifier: Apache-2.0
"""Multi-Gate Residuals against their equations in NumPy loops."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.models import residuals
from tests.models import trunks

NAMES = ("multi_gate", "multi_gate_competitive")


def attend(scores, streams):
  weight = np.exp(scores) / np.exp(scores).sum(axis=0)
  return sum(w[..., None] * s for w, s in zip(weight, streams))


def multi_gate(competitive, module, sublayers, embedding, count=3):
  query, gate_query, bias = (
    np.asarray(a[...]) for a in (module.query, module.gate_query, module.bias)
  )

  def scores(streams, query):
    normed = [trunks.rms_norm(s, trunks.EPS) for s in streams]
    return np.stack(normed) @ query / trunks.WIDTH**0.5

  streams = [np.asarray(embedding)]
  for l, f in enumerate(sublayers):
    y = f(attend(scores(streams, query[l]), streams))
    if len(streams) < count:
      streams = [*streams, y]
      continue
    raw = scores(streams, gate_query[l])
    if competitive:
      gates = np.exp(raw) / (np.exp(bias[l]) + np.exp(raw).sum(axis=0))
    else:
      gates = 1 / (1 + np.exp(-raw - bias[l][:, None, None]))
    streams = [
      s + g[..., None] * (y - s) for s, g in zip(streams, gates, strict=True)
    ]
  return attend(scores(streams, query[-1]), streams)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", NAMES)
def test_is_its_definition_with_its_gradients(name):
  definition = functools.partial(multi_gate, name.endswith("competitive"))
  trunks.check_gradients(name, definition, 5, streams=3, scale=3.0)


def _scheme(name, depth=8, **fields):
  config = config_lib.ModelConfig(
    width=4,
    num_layers=depth // 2,
    num_heads=1,
    residual=config_lib.ResidualConfig(name=name, **fields),
  )
  return residuals.build_residual(config, rngs=None)


@pytest.mark.parametrize("name", NAMES)
def test_streams_open_then_move_by_the_starting_gate_and_stay_bounded(name):
  scheme = _scheme(name, streams=3)
  rng = np.random.default_rng(0)
  values = rng.standard_normal((9, 1, 2, 4)).astype(np.float32)
  (carry, slots), gate = (
    scheme.open(scheme.init(jnp.asarray(values[0])), 0, 8),
    1 / (1 + math.exp(3)) * math.sqrt(21 / 8),
  )
  longest = np.linalg.norm(values, axis=-1).max(0)
  for l in range(8):
    before = np.stack(carry)
    slot = jax.tree.map(lambda a, l=l: a[l], slots)
    carry = scheme.write(carry, slot, jnp.asarray(values[l + 1]))
    after = np.stack(carry)
    expected = before + gate * (values[l + 1] - before)
    if l < 2:
      expected = before.copy()
      expected[l + 1] = values[l + 1]
    np.testing.assert_allclose(after, expected, atol=1e-6)
    assert (np.linalg.norm(after, axis=-1) <= longest + 1e-6).all()


def test_too_many_competing_streams():
  with pytest.raises(
    config_lib.ConfigError, match="^config.model.residual.streams: got 14, exp"
  ):
    _scheme(NAMES[1], streams=14)
  assert _scheme(NAMES[0], streams=14).num_streams == 14
