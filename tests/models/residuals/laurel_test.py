# SPDX-License-Identifier: Apache-2.0
"""LAuReL against its equation."""

import pytest

from tests.models import trunks

pytestmark = pytest.mark.usefixtures("float64")


def _definition(sublayers, p, h):
  for l, f in enumerate(sublayers):
    h = f(h) + h + h @ p.down[l] @ p.up[l]
  return h


def test_is_its_definition():
  trunks.check("laurel_lr", _definition, rank=3)
