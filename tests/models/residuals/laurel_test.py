# SPDX-License-Identifier: Apache-2.0
"""LAuReL's three forms against their equations."""

import numpy as np
import pytest

from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")


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
  fields = {} if name == "laurel_rw" else dict(rank=3)
  # More sublayers than LAuReL-PA looks back.
  trunks.check(name, definition, 7, **fields)
