# SPDX-License-Identifier: Apache-2.0
"""The device: what it is, and its rates beside the published ones."""

from collections.abc import Iterator
import functools

import jax

from attnres_jax import chips
from attnres_jax import environment
from experiments.first_hour import budget
from experiments.first_hour import rows as rows_lib
from experiments.first_hour import timing

PART = "machine"
_MEMORY, _PRODUCTS = "memory, read plus written", "bfloat16 products"


def facts() -> dict[str, str]:
  """Of the device and the code; with `kind` and `platform`."""
  device = jax.devices()[0]
  return environment.facts() | {
    "kind": device.device_kind,
    "platform": device.platform,
  }


def tasks() -> list[budget.Task]:
  """The rates, which limits and predictions assume."""
  return [
    budget.Task(PART, "rates of the device", functools.partial(_rates), 20)
  ]


def _rates() -> Iterator[dict[str, str]]:
  chip = chips.chip_of(jax.devices()[0].device_kind) or chips.Chip(0.0)
  for name, rate, peak, unit, scale in (
    (_MEMORY, timing.copy_rate, chip.hbm_bytes_per_second, "GB/s", 1e9),
    (
      _PRODUCTS, timing.product_rate, chip.peak_flops_per_second, "TFLOP/s",
      1e12,
    ),
  ):  # fmt: skip
    yield rows_lib.make(
      name, measured=rate() / scale, unit=unit, limit=peak / scale or None
    )
