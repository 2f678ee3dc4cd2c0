# SPDX-License-Identifier: Apache-2.0
"""SiameseNorm against the equations of the released block."""

import jax
import numpy as np
import pytest

from attnres_jax import analysis
from attnres_jax import config as config_lib
from attnres_jax.models import residuals
from tests.analysis import networks
from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")


def _norm(x, gain=1.0):
  return trunks.rms_norm(x, trunks.EPS) * gain


def _released(sublayers, p, embedding, table=False):
  a = b = embedding
  for l, f in enumerate(sublayers):
    c = 1.0 if table else np.sqrt(2 * (l // 2 + 1))
    a = _norm(a, p.post_gain[l])
    y = f(a + _norm(b, p.pre_gain[l]))
    a, b = a + y / c, b + y
  return _norm(a, p.post_gain[-1]) + _norm(b, p.pre_gain[-1])


def _table(sublayers, p, embedding):
  return _released(sublayers, p, embedding, table=True)


@pytest.mark.parametrize(
  "name,definition",
  [("siamesenorm", _released), ("siamesenorm_table", _table)],
)
def test_is_its_definition(name, definition):
  trunks.check(name, definition)


@pytest.mark.parametrize("name", ["siamesenorm", "siamesenorm_table"])
def test_mixing_matrix_is_the_sum_of_two_streams(name):
  module = trunks.scheme(name, 6, scale=0.0)
  values = np.random.default_rng(0).standard_normal((7, trunks.WIDTH))
  a = b = values[0]
  of_a, of_b = np.eye(7)[0], np.eye(7)[0]
  expected = []
  for l in range(7):
    factor = 1 / np.sqrt(np.mean(a**2) + trunks.EPS)
    a, of_a = factor * a, factor * of_a
    expected.append(of_a + of_b / np.sqrt(np.mean(b**2) + trunks.EPS))
    if l < 6:
      c = 1.0 if name.endswith("table") else np.sqrt(2 * (l // 2 + 1))
      a, of_a = a + values[l + 1] / c, of_a + np.eye(7)[l + 1] / c
      b, of_b = b + values[l + 1], of_b + np.eye(7)[l + 1]
  found = networks.recorded_matrix(module, values)
  np.testing.assert_allclose(found, expected, atol=1e-6)
  assert analysis.semiseparable_rank(found) == 2


def test_numbers_of_parameters_and_states():
  config = config_lib.ModelConfig(
    width=8, num_layers=2, residual=config_lib.ResidualConfig("siamesenorm")
  )
  scheme = residuals.abstract_residual(config)
  # Of three norms per sublayer, one is the sublayer's own.
  assert sum(leaf.size for leaf in jax.tree.leaves(scheme)) == 2 * 5 * 8
  vector = jax.ShapeDtypeStruct((1, 1, 8), "float32")
  state = jax.eval_shape(type(scheme).init, scheme, vector)
  assert sum(a.size for a in jax.tree.leaves(state)) == 2 * 8
