# SPDX-License-Identifier: Apache-2.0
"""Deep Delta Learning against its equations, token by token."""

import numpy as np
import pytest

from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")
NAMES = ("ddl", "ddl_4", "ddl_sigmoid")


def _read(p, l, state):
  """Compress: [B, T, D, M] to [B, T, D]."""
  if not hasattr(p, "compress"):
    return state[..., 0]
  return sum(p.compress[l, j] * state[..., j] for j in range(state.shape[-1]))


def _definition(sublayers, p, embedding):
  channels = p.value.shape[-1]
  state = np.stack([embedding] * channels, axis=-1)
  for l, f in enumerate(sublayers):
    x = _read(p, l, state)
    c = trunks.rms_norm(x, trunks.EPS) * p.gain[l]
    u = f(c)
    after = np.zeros_like(state)
    for at in np.ndindex(u.shape[:2]):
      k = u[at] / np.sqrt(u[at] @ u[at] + 1e-5**2)
      beta = 2 * trunks.sigmoid(p.beta[l] @ c[at] + p.beta_bias[l])
      if hasattr(p, "value_bias"):
        v = 4 * trunks.sigmoid(x[at] @ p.value[l] + p.value_bias[l])
      else:
        v = c[at] @ p.value[l]
      erase = np.eye(len(k)) - beta * np.outer(k, k)
      after[at] = erase @ state[at] + beta * np.outer(k, v)
    state = after
  return _read(p, len(sublayers), state)


@pytest.mark.parametrize("name", NAMES)
def test_is_its_definition(name):
  trunks.check(name, _definition)


def test_starts_at_beta_1_and_as_the_mean_of_channels():
  p = trunks.parameters(trunks.scheme("ddl_4", 3, scale=0.0))
  np.testing.assert_array_equal(p.beta_bias, 0.0)
  np.testing.assert_array_equal(p.compress, 0.25)
