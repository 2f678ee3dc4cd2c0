# SPDX-License-Identifier: Apache-2.0
"""The table of plans shows the plans of configs that exist."""

import pytest

from attnres_jax.common import csv_rows
from attnres_jax.common import plans as plans_lib
from attnres_jax.config import load
from experiments.arch_sweep import plans

ROW = dict(
  slice="v5p-32", data="4", fsdp="1", expert="4", microbatches="8",
  remat="none", headroom_GiB="22.5", step_seconds="2.0",
  compute_seconds="0.9", memory_seconds="1.35", bound="memory",
  chip_hours="200",
  jax="1", libtpu="2", commit="abc",
)  # fmt: skip


def test_a_line_per_slice():
  name = "rho45.0-eta0.3-{}-0"
  rows = [
    ROW | dict(config=name.format("prenorm")),
    ROW | dict(
      config=name.format("full_attnres"), step_seconds="2.1",
      headroom_GiB="9.5", memory_seconds="1.8", chip_hours="210",
    ),
    ROW | dict(config="rho60.0-eta0.7-prenorm-0", slice="v6e-16"),
    ROW | dict(config="rho2.3-eta0.5-prenorm-0"),  # Of the laptop's scale.
    ROW | dict(config="194m-prenorm-seed0-0", commit="other"),
  ]  # fmt: skip
  lines = plans.table(rows).splitlines()
  assert lines[2:4] == [
    "| v5p-32 | 1 of 25 | 2.00 to 2.00 | 2.10 to 2.10 | 1.050 to 1.050 |"
    " 1.50 to 2.00 | 9.5 | 200 | 210 |",
    "| v6e-16 | 0 of 25 |  |  |  | 1.50 to 1.50 | 22.5 | 200 | 0 |",
  ]
  assert lines[-1].endswith("commits abc.")


# Not all 25, since counting parameters for a config takes a third of a second.
@pytest.mark.parametrize("shape", ((15.0, 0.3), (75.0, 0.3)))
def test_committed_plans_are_those_of_configs_as_they_are_now(shape):
  found = plans.of_shapes(csv_rows.read(plans_lib.FILE))
  rows = {k: row for k, row in found.items() if k[1] == shape}
  assert rows
  for (_, (rho, eta), residual), row in rows.items():
    spec = f"scale=paper,planned,rho={rho},eta={eta},residual={residual}"
    config = load.load_config(f"configs/arch_sweep.py:{spec}")
    assert row["config_hash"] == plans_lib.config_hash(config)
