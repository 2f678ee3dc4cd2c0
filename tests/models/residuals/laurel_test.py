# SPDX-License-Identifier: Apache-2.0
"""LAuReL's three forms against their equations."""

import jax
import numpy as np
import pytest

from attnres_jax import analysis
from attnres_jax import config as config_lib
from attnres_jax.models import residuals
from tests.analysis import networks
from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")
NAMES = ("laurel_rw", "laurel_lr", "laurel_pa")


def _weights(p, l):
  weight = np.exp(p.logits[l])
  return 2 * weight / weight.sum()


def _residual_weights(sublayers, p, h):
  for l, f in enumerate(sublayers):
    alpha, beta = _weights(p, l)
    h = alpha * f(h) + beta * h
  return h


def _low_rank(sublayers, p, h):
  for l, f in enumerate(sublayers):
    h = f(h) + h + h @ p.down[l] @ p.up[l]
  return h


def _previous_activations(sublayers, p, h):
  inputs = [h]
  for l, f in enumerate(sublayers):
    h = inputs[-1]
    total = f(h) + h
    for j in range(1, p.weight.shape[1] + 1):
      if j < len(inputs):
        total = total + p.weight[l, j - 1] * (
          inputs[-1 - j] @ p.down[l] @ p.up[l]
        )
    inputs.append(total)
  return inputs[-1]


@pytest.mark.parametrize(
  "name,definition",
  [
    ("laurel_rw", _residual_weights),
    ("laurel_lr", _low_rank),
    ("laurel_pa", _previous_activations),
  ],
)
def test_is_its_definition(name, definition):
  # More sublayers than LAuReL-PA looks back.
  trunks.check(name, definition, 7, rank=3)


@pytest.mark.parametrize("name", NAMES)
def test_starts_as_prenorm(name):
  layers, embedding = trunks.toy(4)
  module = trunks.scheme(name, 4, scale=0.0)
  found = trunks.run(layers, module, embedding, scan=False)
  expected = trunks.prenorm(trunks.functions(layers, 4), embedding)
  np.testing.assert_allclose(found, expected, atol=1e-12)


def test_mixing_matrix_of_residual_weights():
  """M[i -> l] = alpha_i times all beta_j of later sublayers."""
  module = trunks.scheme("laurel_rw", 6)
  values = np.random.default_rng(0).standard_normal((7, trunks.WIDTH))
  p, expected = trunks.parameters(module), np.zeros((7, 7))
  for l in range(7):
    for i in range(l + 1):
      kept = 1.0 if i == 0 else _weights(p, i - 1)[0]
      for j in range(i, l):
        kept = kept * _weights(p, j)[1]
      expected[l, i] = kept
  found = networks.recorded_matrix(module, values)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert analysis.semiseparable_rank(found) == 1


def test_numbers_of_parameters_and_states():
  width, rank, back = 8, 64, 4
  vector = jax.ShapeDtypeStruct((1, 1, width), "float32")
  for name, count, states in (
    ("laurel_rw", 2, 1),
    ("laurel_lr", 2 * rank * width, 1),
    ("laurel_pa", 2 * rank * width + back, 1 + back),
  ):
    config = config_lib.ModelConfig(
      width=width, num_layers=2, residual=config_lib.ResidualConfig(name=name)
    )
    scheme = residuals.abstract_residual(config)
    assert sum(leaf.size for leaf in jax.tree.leaves(scheme)) == 4 * count
    state = jax.eval_shape(type(scheme).init, scheme, vector)
    assert sum(a.size for a in jax.tree.leaves(state)) == states * width
