# SPDX-License-Identifier: Apache-2.0
"""Deep Delta Learning against its equations, token by token."""

import numpy as np
import pytest

from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")


def _definition(sublayers, p, x):
  for l, f in enumerate(sublayers):
    c = trunks.rms_norm(x, trunks.EPS) * p.gain[l]
    u = f(c)
    after = np.zeros_like(x)
    for at in np.ndindex(u.shape[:2]):
      k = u[at] / np.sqrt(u[at] @ u[at] + 1e-5**2)
      beta = 2 * trunks.sigmoid(p.beta[l] @ c[at] + p.beta_bias[l])
      v = c[at] @ p.value[l]
      erase = np.eye(len(k)) - beta * np.outer(k, k)
      after[at] = erase @ x[at] + beta * k * v
    x = after
  return x


def test_is_its_definition():
  trunks.check("ddl", _definition)


def test_starts_at_beta_1():
  p = trunks.parameters(trunks.scheme("ddl", 3, scale=0.0))
  np.testing.assert_array_equal(p.beta_bias, 0.0)
