# SPDX-License-Identifier: Apache-2.0
"""ELMo's readout against its equations."""

import numpy as np
import pytest

from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")


def _weights(p):
  weight = np.exp(p.logits)
  return weight / weight.sum()


def _definition(sublayers, p, h):
  states = [h]
  for f in sublayers:
    states.append(states[-1] + f(states[-1]))
  return sum(w * state for w, state in zip(_weights(p), states))


def test_is_its_definition():
  trunks.check("elmo", _definition)


def test_starts_as_the_mean_of_all_states():
  p = trunks.parameters(trunks.scheme("elmo", 4, scale=0.0))
  np.testing.assert_array_equal(_weights(p), np.full(5, 0.2))
