# SPDX-License-Identifier: Apache-2.0
"""Parameter arithmetic against the released and the published counts."""

from attnres_jax.scaling import architecture
from attnres_jax.scaling import paper
from tests import tiers

# Per row of Table 2: activated millions with 64 and 256 experts and a dense
# first block, with 512 and none; billions in total with 512 and with 256
# experts and no dense block.
ROWS = [
  ("194M", 188.8, 190.7, 193.67, 6.70, 3.39),
  ("241M", 235.2, 237.4, 240.85, 8.39, 4.25),
  ("296M", 289.5, 292.1, 296.01, 10.35, 5.24),
  ("436M", 427.8, 431.2, 436.27, 15.36, 7.77),
  ("528M", 518.6, 522.5, 528.30, 18.72, 9.48),
]


@tiers.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_table_2(row):
  name, e64, e256, e512, total512, total256 = row
  size = {size.name: size for size in paper.TABLE_2}[name]
  network = size.model
  shape = size.num_layers, size.width, size.num_heads, size.expert_width

  def total(model):
    count = architecture.count(model)
    return round((count.total - count.state) / 1e9, 2)

  def active(num_experts):
    other = architecture.network(*shape, num_experts, first_dense=True)
    return round(architecture.active_params(other) / 1e6, 1)

  assert (active(64), active(256)) == (e64, e256)
  millions = architecture.active_params(network) / 1e6
  assert round(millions, 2) == e512 and f"{millions:.0f}M" == name
  assert total(network) == total512
  fewer = architecture.network(*shape, num_experts=256)
  assert total(fewer) == total256
