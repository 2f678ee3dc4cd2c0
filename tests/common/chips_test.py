# SPDX-License-Identifier: Apache-2.0
"""The table of chips."""

import pytest

from attnres_jax.common import chips


@pytest.mark.parametrize(
  "kind, peak",
  [
    ("TPU v4", 275e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5", 459e12),
    ("TPU v6 lite", 918e12),
    ("NVIDIA A100-SXM4-80GB", 312e12),
    ("NVIDIA H100 80GB HBM3", 989e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA L40S", 362e12),
    ("NVIDIA L40", None),
    ("cpu", None),
    ("TPU v99", None),
  ],
)
def test_chip_table(kind, peak):
  chip = chips.chip_of(kind)
  assert (chip and chip.peak_flops_per_second) == peak


def test_utilisation():
  assert chips.model_flop_utilisation(275e12, "TPU v4", 4) == 0.25
  assert chips.model_flop_utilisation(275e12, "cpu", 4) is None
