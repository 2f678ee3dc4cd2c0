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


@pytest.mark.parametrize(
  "kind, gib",
  [("TPU v4", 30.75), ("TPU v5 lite", 15.75), ("TPU v6 lite", 31.25),
   ("TPU7x", 94.75)],
)  # fmt: skip
def test_memory_is_what_a_program_may_use(kind, gib):
  """What the compiler says on these chips: "Used 31.29G of 31.25G hbm"."""
  assert chips.CHIPS[kind].hbm_bytes == gib * 2**30


@pytest.mark.parametrize("kind", ["TPU v5", "TPU7x"])
def test_devices_share_the_links_of_their_chip(kind):
  """Both publish 1200 GB/s per chip, in both directions together."""
  devices = chips.devices_per_chip(kind)
  assert 2 * devices * chips.CHIPS[kind].link_bytes_per_second == 1200e9


def test_utilisation():
  assert chips.model_flop_utilisation(275e12, "TPU v4", 4) == 0.25
  assert chips.model_flop_utilisation(275e12, "cpu", 4) is None
