# SPDX-License-Identifier: Apache-2.0
"""The table of plans shows the plans of configs that exist."""

from attnres_jax.common import csv_rows
from attnres_jax.common import plans as plans_lib
from attnres_jax.config import load
from experiments.scaling_law import plans

ROW = dict(
  slice="v6e-16", data="2", fsdp="1", expert="8", microbatches="6",
  remat="none", headroom_GiB="9.5", step_seconds="1.047",
  compute_seconds="0.529", bound="memory", mfu_bound="0.485", jax="1",
  libtpu="2", commit="abc",
)  # fmt: skip


def test_each_slice_and_scheme_has_its_sum():
  rows = [
    ROW | dict(config=f"{size}-{scheme}-seed0-0", chip_hours=str(hours))
    for size, scheme, hours in (
      ("194m", "prenorm", 1000), ("528m", "prenorm", 5000),
      *((f"{n}m", "block_attnres", 2) for n in (194, 241, 296, 436, 528)),
    )
  ]  # fmt: skip
  rows.append(ROW | dict(config="another", chip_hours="7"))
  rows.append(
    ROW | dict(config="194m-prenorm-seed0-0", slice="v5p-32", chip_hours="9")
  )
  rows[0] = rows[0] | dict(step_seconds="0.529")
  text = plans.table(rows)
  lines = text.splitlines()
  assert "| v6e-16 | PreNorm | 1,000 |  |  |  | 5,000 |  |" in lines
  assert "| v6e-16 | Block AttnRes | 2 | 2 | 2 | 2 | 2 | 10 |" in lines
  assert "| v5p-32 | PreNorm | 9 |  |  |  |  |  |" in lines
  assert "On v6e-16, a step takes 1.00 to 1.98 times its compute." in text
  assert "another" not in text and "jax 1; libtpu 2; commit abc" in text


def test_committed_plans_are_those_of_configs_as_they_are_now():
  found = plans._of_table_2(csv_rows.read(plans_lib.FILE))
  assert found
  hashes = {}
  for _, size, scheme in found:
    spec = f"scale=paper,planned,size={size.lower()},residual={scheme}"
    if (size, scheme) not in hashes:
      config = load.load_config(f"configs/scaling.py:{spec}")
      hashes[size, scheme] = plans_lib.config_hash(config)
  for (_, *of_run), row in found.items():
    assert row["config_hash"] == hashes[tuple(of_run)]
