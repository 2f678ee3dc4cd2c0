# SPDX-License-Identifier: Apache-2.0
"""SiameseNorm against the equations of the released block."""

import numpy as np
import pytest

from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")


def _norm(x, gain=1.0):
  return trunks.rms_norm(x, trunks.EPS) * gain


def _definition(sublayers, p, embedding):
  a = b = embedding
  for l, f in enumerate(sublayers):
    c = np.sqrt(2 * (l // 2 + 1))
    a = _norm(a, p.post_gain[l])
    y = f(a + _norm(b, p.pre_gain[l]))
    a, b = a + y / c, b + y
  return _norm(a, p.post_gain[-1]) + _norm(b, p.pre_gain[-1])


def test_is_its_definition():
  trunks.check("siamesenorm", _definition)
