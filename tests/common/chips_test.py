# SPDX-License-Identifier: Apache-2.0
"""The table of chips."""

import pytest

from attnres_jax.common import chips


@pytest.mark.parametrize(
  "kind, peak",
  [
    ("TPU v5 lite", 197e12),
    ("TPU v5", 459e12),
    ("NVIDIA A100-SXM4-80GB", 312e12),
    ("NVIDIA H100 80GB HBM3", 989e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA L40S", 362e12),
    ("NVIDIA L40", None),
    ("cpu", None),
    ("TPU v99", None),
  ],
)
def test_the_longest_name_that_begins_a_kind_is_its_row(kind, peak):
  chip = chips.chip_of(kind)
  assert (chip and chip.peak_flops_per_second) == peak


@pytest.mark.parametrize("kind", ["TPU v5", "TPU7x"])
def test_devices_share_the_links_of_their_chip(kind):
  """Both publish 1200 GB/s per chip, in both directions together."""
  devices = chips.devices_per_chip(kind)
  assert 2 * devices * chips.CHIPS[kind].link_bytes_per_second == 1200e9


def test_utilisation():
  assert chips.model_flop_utilisation(275e12, "TPU v4", 4) == 0.25
  assert chips.model_flop_utilisation(275e12, "cpu", 4) is None
