# SPDX-License-Identifier: Apache-2.0
"""Rows of a bill, from costs and bounds."""

from attnres_jax.common import chips
from attnres_jax.plan import attribution
from attnres_jax.plan import bill
from attnres_jax.plan import least

# One FLOP, one byte and one sent byte take a second each.
CHIP = chips.Chip(1.0, 0.0, 1.0, 1.0)


def _rows():
  costs = {
    "mlp": attribution.Cost(moved_bytes=6.0, flops=8.0),
    "moe": attribution.Cost(moved_bytes=2.0, flops=3.0, kernels=1),
    "kda": attribution.Cost(flops=1.0, sent_bytes=4.0, overlapped_bytes=1.0),
    "other": attribution.Cost(),
    "nothing": attribution.Cost(),
  }
  needs = {
    "mlp": least.Least(3.0, 10.0),
    "moe": least.Least(4.0, 5.0),
    "norms": least.Least(1.0),
    "accumulation": least.Least(0.0),
  }
  return bill.make_rows(costs, needs, CHIP)


def test_kernels_are_charged_their_bound():
  rows = {row["part"]: row for row in _rows()}
  charged = {name: row["charged_flops"] for name, row in rows.items()}
  assert charged == {"mlp": 8, "moe": 5, "kda": 1, "norms": 0, "other": 0}
  bounds = {name: (row["seconds"], row["bound"]) for name, row in rows.items()}
  assert bounds["mlp"] == (8, "compute") and bounds["kda"] == (4, "link")
  assert rows["mlp"]["share"] == 8 / 17
