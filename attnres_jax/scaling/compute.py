# SPDX-License-Identifier: Apache-2.0
"""Training compute, counted in three ways, in PFLOP/s-days.

The paper gives losses against compute but not how it counts. The choices are

  6nd        six FLOPs per activated parameter and token, without embedding and
             head;
  attention  plus the causal attention over the sequence;
  residual   plus the residual scheme's own work, as counted by `flops`.

None includes the recurrence of linear attention. A fit or figure over compute
must always name its way of counting.
"""

from attnres_jax import config as config_lib
from attnres_jax import flops as flops_lib

PFLOPS_DAY = 1e15 * 24 * 3600
COUNTINGS = ("6nd", "attention", "residual")
# Labels for axes and tables.
LABELS = {
  "6nd": "6ND",
  "attention": "6ND + causal attention",
  "residual": "6ND + causal attention + depth attention",
}


def pflops_days(
  flops: "flops_lib.FlopsPerToken", tokens: float, counting: str
) -> float:
  """Training compute of `tokens` tokens under one of `COUNTINGS`."""
  if counting not in COUNTINGS:
    config_lib.fail_argument(
      "counting", counting, "one of " + ", ".join(COUNTINGS)
    )
  forward = flops.projections + flops.mlp
  if counting != "6nd":
    forward += flops.attention
  if counting == "residual":
    forward += flops.residual
  # The backward pass takes twice as many.
  return 3 * forward * tokens / PFLOPS_DAY
