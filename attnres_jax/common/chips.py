# SPDX-License-Identifier: Apache-2.0
"""Peak rates of chips: arithmetic, memory, links."""

from collections.abc import Mapping
import dataclasses
from typing import TypeVar

T = TypeVar("T")
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """One JAX device. TPU v2, v3 and 7x have two devices per chip.

  Zero stands for unknown.

  Attributes:
    peak_flops_per_second: of dense bfloat16 products (float16 if a chip has no
      bfloat16).
    hbm_bytes: memory that a program may use. The compiler says so on the chip
      ("of 31.25G hbm"); without one, it also counts what the runtime reserves.
    hbm_bytes_per_second: bandwidth between memory and core, as assumed by the
      compiler.
    link_bytes_per_second: bandwidth over all links to other chips, one way, as
      published; of a device, its share.
    clock_hz: of the core.
    published_hbm_bytes_per_second: bandwidth as the maker states it.
    reached_flops_per_second: of large bfloat16 products, as measured.
    torus_axes: of the network of links, of which a chip has two per axis.
  """

  peak_flops_per_second: float
  hbm_bytes: float = 0.0
  hbm_bytes_per_second: float = 0.0
  link_bytes_per_second: float = 0.0
  clock_hz: float = 0.0
  published_hbm_bytes_per_second: float = 0.0
  reached_flops_per_second: float = 0.0
  torus_axes: int = 3


def _gpu(peak_flops: float, memory_bytes: int, hbm: float, link: float) -> Chip:
  """A GPU whose programs may use what JAX reserves by default, 75 %.

  An H100 reached 812.25 TFLOP/s in products and 2,872.3 GB/s in copies
  (experiments/first_hour). Newer GPUs are assumed to reach as much of theirs.
  """
  products, copies = 812.25 / 989, 2872.3 / 3352
  return Chip(
    peak_flops, 0.75 * memory_bytes, copies * hbm, link, 0.0, hbm,
    products * peak_flops,
  )  # fmt: skip


# By prefix of `device_kind`; the longest match counts.
CHIPS = {
  "TPU v2": Chip(22.5e12),
  "TPU v3": Chip(61.5e12),
  "TPU v4": Chip(275e12, 30.75 * _GIB, 1230e9, 300e9, 1.05e9, 1228e9),
  "TPU v4 lite": Chip(138e12),
  "TPU v5 lite": Chip(
    197e12, 15.75 * _GIB, 820e9, 200e9, 1.5e9, 819e9, torus_axes=2
  ),
  "TPU v5e": Chip(197e12),
  "TPU v5": Chip(459e12, 95 * _GIB, 2460e9, 600e9, 1.75e9, 2765e9),
  "TPU v5p": Chip(459e12),
  "TPU v6 lite": Chip(
    918e12, 31.25 * _GIB, 1640e9, 448e9, 1.75e9, 1640e9, torus_axes=2
  ),
  "TPU v6e": Chip(918e12),
  "TPU7x": Chip(1153.5e12, 94.75 * _GIB, 3700e9, 300e9, 2.2e9, 3690e9),
  "TPU v7x": Chip(1153.5e12),
  "NVIDIA B200": _gpu(2250e12, 191514017792, 8000e9, 900e9),
  "NVIDIA GB200": Chip(2500e12),
  "NVIDIA H200": _gpu(989e12, 150121545728, 4800e9, 450e9),
  "NVIDIA H100": _gpu(989e12, 84942979072, 3352e9, 450e9),
  "NVIDIA H100 PCIe": Chip(756e12),
  "NVIDIA GH200": Chip(989e12),
  "NVIDIA A100": Chip(312e12),
  "NVIDIA A10G": Chip(70e12),
  "NVIDIA L4": Chip(121e12),
  "NVIDIA L40S": Chip(362e12),
  "Tesla T4": Chip(65e12),
  "Tesla V100": Chip(125e12),
}


# By prefix of `device_kind`: kinds of which a chip has two devices.
_IN_PAIRS = ("TPU v2", "TPU v3", "TPU7x", "TPU v7x")


def devices_per_chip(device_kind: str) -> int:
  """How many JAX devices share one chip."""
  return 2 if any(_matches(device_kind, kind) for kind in _IN_PAIRS) else 1


def chip_of(device_kind: str) -> Chip | None:
  """The row of a device of this kind; None if there is none."""
  return row_of(CHIPS, device_kind)


def row_of(table: Mapping[str, T], device_kind: str) -> T | None:
  """The row with the longest name that is a prefix of the kind, if any."""
  rows = [kind for kind in table if _matches(device_kind, kind)]
  return table[max(rows, key=len)] if rows else None


def model_flop_utilisation(
  flops_per_second: float, device_kind: str, num_devices: int
) -> float | None:
  """Fraction of the peak of all devices; None on CPU and unknown chips."""
  chip = chip_of(device_kind)
  if chip is None:
    return None
  return flops_per_second / (chip.peak_flops_per_second * num_devices)


def _matches(device_kind: str, row: str) -> bool:
  """Whether `row` is a prefix of `device_kind` that ends at a word boundary.

  So "NVIDIA A100" matches "NVIDIA A100-SXM4-80GB", but "NVIDIA L4" does not
  match "NVIDIA L40S".
  """
  rest = device_kind[len(row) :]
  return device_kind.startswith(row) and not rest[:1].isalnum()
