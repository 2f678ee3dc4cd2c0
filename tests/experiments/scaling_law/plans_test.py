# SPDX-License-Identifier: Apache-2.0
"""The table of plans shows the plans of configs that exist."""

from attnres_jax.common import csv_rows
from attnres_jax.common import plans as plans_lib
from attnres_jax.config import load
from experiments.scaling_law import plans


def test_committed_plans_are_those_of_configs_as_they_are_now():
  rows = plans._of_table_2(csv_rows.read(plans_lib.FILE))
  assert rows
  hashes = {}
  for _, size, scheme in rows:
    spec = f"scale=paper,planned,size={size.lower()},residual={scheme}"
    if (size, scheme) not in hashes:
      config = load.load_config(f"configs/scaling.py:{spec}")
      hashes[size, scheme] = plans_lib.config_hash(config)
  for (_, *of_run), row in rows.items():
    assert row["config_hash"] == hashes[tuple(of_run)]
