# SPDX-License-Identifier: Apache-2.0
"""Dense connections against loops over all pairs of outputs, in NumPy."""

import numpy as np
import pytest

from attnres_jax import config as config_lib
from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")


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
def test_is_its_definition_with_its_gradients(name):
  def definition(module, sublayers, embedding):
    weight, start = np.asarray(module.weight[...]), np.asarray(embedding)
    return DEFINITIONS[name](sublayers, weight, start)

  count = 8 if name.startswith("dwa") else 3
  trunks.check_gradients(name, definition, count)


@pytest.mark.parametrize("name", ["dwa_2x2", "mudd"])
def test_averages_need_blocks(name):
  with pytest.raises(
    config_lib.ConfigError, match=f"num_layers.*got 1.*{name}"
  ):
    trunks.scheme(name, 2)
