# SPDX-License-Identifier: Apache-2.0
"""Multi-Gate Residuals against their equations in NumPy loops."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax.models import residuals
from tests import tiny_network
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


@pytest.mark.parametrize("name", NAMES)
def test_gates_at_the_start(name):
  config = tiny_network.config(name, num_layers=4, streams=3)
  scheme = residuals.build_residual(config, rngs=None)
  assert not np.any(scheme.gate_query[...])
  found = scheme.gates(jnp.zeros((3, 1, 1)), scheme.bias[0])
  gate = 1 / (1 + math.exp(3)) * math.sqrt(21 / 8)
  np.testing.assert_allclose(found, np.full((3, 1, 1), gate), rtol=1e-6)
