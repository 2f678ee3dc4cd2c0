# SPDX-License-Identifier: Apache-2.0
"""Dense connections against loops over all pairs of outputs, in NumPy."""

import numpy as np
import pytest

from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")


def _dense(sublayers, weight, embedding):
  """h_l = sum_i W_{i->l} v_i, with scalars or matrices."""
  values, used = [embedding], 0
  for f in [*sublayers, lambda h: h]:
    h = np.zeros_like(embedding)
    for v in values:
      w = weight[used]
      h = h + (w * v if np.ndim(w) == 0 else v @ w)
      used += 1
    values.append(f(h))
  assert used == len(weight)
  return values[-1]


def _dwa(sublayers, weight, embedding):
  """X_t = Block_t(Y_{t-1}), and Y_t = sum_j a_{t,j} X_j."""
  outputs, y, used = [embedding], embedding, 0
  for t in range(1, len(sublayers) // 2 + 1):
    y = y + sublayers[2 * t - 2](y)
    y = y + sublayers[2 * t - 1](y)
    outputs.append(y)
    y = np.zeros_like(embedding)
    for output in outputs:
      y = y + weight[used] * output
      used += 1
  assert used == len(weight)
  return y


DEFINITIONS = {"densenet": _dense, "denseformer": _dense, "dwa": _dwa}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_is_its_definition_with_its_gradients(name):
  def definition(module, sublayers, embedding):
    weight, start = np.asarray(module.weight[...]), np.asarray(embedding)
    return DEFINITIONS[name](sublayers, weight, start)

  count = 6 if name == "dwa" else 3
  trunks.check_gradients(name, definition, count)
