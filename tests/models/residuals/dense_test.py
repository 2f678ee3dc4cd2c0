# SPDX-License-Identifier: Apache-2.0
"""Dense connections against loops over all pairs of outputs, in NumPy."""

from flax import nnx
import jax
import numpy as np
import pytest

from attnres_jax import analysis
from attnres_jax import config as config_lib
from tests.analysis import networks
from tests.models import trunks


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def _dense(sublayers, weight, embedding):
  """h_l = sum_i W_{i->l} v_i, with scalars or matrices."""
  values, used = [embedding], 0
  for f in [*sublayers, lambda h: h]:
    h = np.zeros_like(embedding)
    for v in values:
      one = weight[used]
      h = h + (one * v if np.ndim(one) == 0 else v @ one)
      used += 1
    values.append(f(h))
  assert used == len(weight)
  return values[-1]


def _dwa(sublayers, weight, embedding, dilation, period):
  """X_t = Block_t(Y_{t-1}), and Y_t = sum_j a_{t,j} X_j every `period`."""
  outputs, y, used = [embedding], embedding, 0
  for t in range(1, len(sublayers) // 2 + 1):
    y = y + sublayers[2 * t - 2](y)
    y = y + sublayers[2 * t - 1](y)
    outputs.append(y)
    if t % period == 0:
      y = np.zeros_like(embedding)
      for j in range(t + 1):
        if (t - j) % dilation == 0:
          y = y + weight[used] * outputs[j]
          used += 1
  assert used == len(weight)
  return y


DEFINITIONS = {
  "densenet": _dense,
  "denseformer": _dense,
  "dwa": lambda *args: _dwa(*args, 1, 1),
  "dwa_2x2": lambda *args: _dwa(*args, 2, 2),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_definition(name):
  count = 8 if name.startswith("dwa") else 3
  layers, embedding = trunks.toy(count)
  scheme = trunks.scheme(name, count)
  value, (_, by_scheme, _) = trunks.value_and_grad(layers, scheme, embedding)
  sublayers = trunks.functions(layers, count)

  def expected(weight):
    return trunks.score(
      DEFINITIONS[name](sublayers, weight, np.asarray(embedding))
    )

  weight = np.asarray(scheme.weight)
  np.testing.assert_allclose(value, expected(weight), rtol=1e-12)
  (gradient,) = trunks.gradient(expected, weight)
  np.testing.assert_allclose(by_scheme.weight, gradient, atol=1e-10)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_starts_as_prenorm(name):
  layers, embedding = trunks.toy(4)
  scheme = trunks.scheme(name, 4, scale=0.0)
  want = trunks.prenorm(trunks.functions(layers, 4), embedding)
  got = trunks.run(layers, scheme, embedding)
  np.testing.assert_allclose(got, want, rtol=1e-13)


def test_number_of_weights():
  L, D = 8, trunks.WIDTH
  sizes = {name: trunks.scheme(name, L).weight.shape for name in DEFINITIONS}
  assert sizes == {
    "densenet": (L * (L + 1) // 2 + L + 1, D, D),
    "denseformer": (L * (L + 1) // 2 + L + 1,),
    "dwa": (L // 2 * (L // 2 + 3) // 2,),
    "dwa_2x2": (2 + 3,),  # X_0, X_2 after block 2; X_0, X_2, X_4 after 4
  }


def test_averages_need_blocks():
  with pytest.raises(
    config_lib.ConfigError, match="num_layers.*got 1.*dwa_2x2"
  ):
    trunks.scheme("dwa_2x2", 2)


def test_mixing_matrix_of_scalars():
  with jax.enable_x64(False):
    model = networks.network("denseformer")
    matrix = analysis.mixing_matrix(
      model, networks.tokens(1, 2), include_output=True
    )
  expected = np.zeros((7, 7))
  expected[np.tril_indices(7)] = np.asarray(model.residual.weight)
  np.testing.assert_allclose(matrix, expected, atol=1e-6)
  assert analysis.semiseparable_rank(matrix[:-1, :-1]) == 3  # L / 2


def test_mixing_matrix_of_averages():
  with jax.enable_x64(False):
    model = networks.network("dwa_2x2", num_layers=4)
    matrix = analysis.mixing_matrix(
      model, networks.tokens(1, 2), include_output=True
    )
  # Reads as combinations of the values, which are unit vectors.
  values, reads = iter(np.eye(9)), []

  def sublayer(h):
    reads.append(h)
    return next(values)

  embedding = next(values)
  weight = np.asarray(model.residual.weight)
  reads.append(DEFINITIONS["dwa_2x2"]([sublayer] * 8, weight, embedding))
  np.testing.assert_allclose(matrix, reads, atol=1e-5)


def test_mixing_matrix_of_scaled_identities():
  with jax.enable_x64(False):
    model = networks.network("densenet", num_layers=1, block_size=2)
    model = jax.tree.map(lambda a: a, model)
    weight = np.float32([2.0, 3.0, 5.0, 7.0, 11.0, 13.0])
    one = np.eye(16, dtype=np.float32)
    model.residual.weight = nnx.Param(weight[:, None, None] * one)
    matrix = analysis.mixing_matrix(
      model, networks.tokens(1, 2), include_output=True
    )
  expected = np.float32([[2, 0, 0], [3, 5, 0], [7, 11, 13]])
  np.testing.assert_allclose(matrix, expected, rtol=1e-6)
